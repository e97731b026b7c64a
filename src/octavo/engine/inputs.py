"""From a prompt and SamplingParams to Requests, with every check that needs the model: nothing bad gets past this file."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.config import BLOCK_SIZE
from octavo.core.request import Request
from octavo.core.sampling import MAX_N, MOST_CANDIDATES, SamplingParams
from octavo.engine import groups
from octavo.errors import ContextTooLong, InvalidRequest, shown
from octavo.scheduler import beams

PRIORITIES = 2**63
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
MOST_TENANT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt. ``text`` is None where only ids were given."""

    text: str | None
    ids: list[int]
    cache_salt: str = ""  # only requests with the same one share cached prefixes


def check_priority(value: Any, policy: str) -> None:
    """Whether a request may have this priority. Raises: InvalidRequest; also where the policy would pay no heed to it, as in vLLM."""
    if isinstance(value, bool) or not isinstance(value, int) or not -PRIORITIES <= value < PRIORITIES:
        raise InvalidRequest(f"priority must be a whole number of 64 bits, not {shown(value)}", "priority")
    if value and policy != "priority":
        raise InvalidRequest(f"priority is {value}, and the scheduling policy {policy} pays no heed to it: priority does", "priority")


class Inputs:
    """Checks prompts and parameters against one model and makes Requests of them.

    ``tokenizer`` may be None (a checkpoint without one): then prompts must be token ids. ``max_model_len``: prompt and
    output together. ``seed``: the engine's; requests without a seed of their own get one derived from it and a counter.
    ``max_num_seqs``, ``num_kv_blocks``, ``block_size`` and ``sliding`` (every layer sees a window only): what the beams of one search must fit.
    """

    def __init__(
        self, *, tokenizer: Any | None, vocab: int, max_model_len: int, max_logprobs: int, eos_ids: Sequence[int], seed: int,
        max_num_seqs: int = MAX_N, num_kv_blocks: int | None = None, block_size: int = BLOCK_SIZE, sliding: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.max_model_len = max_model_len
        self.max_logprobs = max_logprobs
        self.eos_ids = frozenset(eos_ids)
        self._max_num_seqs = max_num_seqs
        self._num_kv_blocks, self._block_size, self._sliding = num_kv_blocks, block_size, sliding
        self._seed = seed
        self._unseeded = itertools.count()

    def prompt(self, given: Any, *, add_special_tokens: bool = True) -> Prompt:
        """Tokenize and check one prompt: a string, {"prompt": …}, {"prompt_token_ids": […]} or a list of ids. A dictionary may have a
        ``cache_salt``: a text that keeps its cached prefix apart from those of other salts.

        Raises: InvalidRequest, ContextTooLong; both name the field and the numbers.
        """
        text, ids, salt = (given, None, "") if isinstance(given, str) else (None, given, "")
        if isinstance(given, Mapping):
            if unknown := [key for key in given if key not in PROMPT_KEYS]:
                raise InvalidRequest(f"a prompt has the keys prompt, prompt_token_ids and cache_salt, not {shown(unknown[0])}", "prompt")
            text, ids = given.get("prompt"), given.get("prompt_token_ids")
            if text is None and ids is None:
                raise InvalidRequest("a prompt needs the key prompt or prompt_token_ids", "prompt")
            if text is not None and not isinstance(text, str):
                raise InvalidRequest(f"prompt must be a string, not {type(text).__name__}", "prompt")
            salt = cache_salt(given.get("cache_salt"))
        if text is not None and ids is None:
            return Prompt(text, self._check_length(self._tokens(text, "prompt", add_special_tokens=add_special_tokens), "prompt"), salt)
        return Prompt(text, self._check_length(self._check_ids(ids), "prompt_token_ids"), salt)

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that the request's field ``param`` holds, whether the model has them all or not.

        Raises: InvalidRequest without a tokenizer, and for what is no text.
        """
        if self.tokenizer is None:
            raise InvalidRequest(f"{param} is text, and this model came without a tokenizer: give token ids, or the setting tokenizer", param)
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param) from error.__cause__

    def check(self, params: Any) -> tuple[tuple[int, ...], ...]:
        """Check parameters against the model. Returns the tokenized bad_words.

        Raises: InvalidRequest naming the field and the numbers.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {type(params).__name__}", "sampling_params")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(getattr(params, name), name)
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids), ("allowed_token_ids", params.allowed_token_ids or ()), ("logit_bias", params.logit_bias or ()),
        ):
            for token in ids:
                if not 0 <= token < self.vocab:
                    raise InvalidRequest(f"{name} holds the token id {shown(token)}; the vocabulary has the ids 0 to {self.vocab - 1}", name)
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and this model came without one", "stop")
        bad_words = self._bad_words(params.bad_words)
        self._check_choice(params, bad_words)
        if params.use_beam_search:
            self._check_beams(params)
        return bad_words

    def check_room(self, prompt: Prompt, params: SamplingParams, param: str = "prompt") -> None:
        """Whether the KV pool could hold the beam search that is asked for. Raises: ContextTooLong, naming ``param``."""
        beams.check_room(len(prompt.ids), params.beam_width, self._num_kv_blocks, self._block_size, sliding=self._sliding, param=param)

    def requests(
        self, request_id: str, prompt: Prompt, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], *, arrival: float, priority: int = 0,
        tenant: str = "",
    ) -> list[Request]:
        """The Requests of a prompt and parameters that were checked: n, or one a beam. Takes a seed from the engine's counter if there is none.

        Raises: ContextTooLong for a beam search that the whole pool could not hold.
        """
        count = params.num_sequences
        self.check_room(prompt, params)
        # Negative seeds are the same 64 bits read as unsigned.
        seed = groups.engine_seed(self._seed, next(self._unseeded)) if params.seed is None else params.seed & groups.MASK
        room = self.max_model_len if params.max_tokens is None else len(prompt.ids) + params.max_tokens
        # The prompt is scored once, not n times.
        unscored = msgspec.structs.replace(params, prompt_logprobs=None) if count > 1 and params.prompt_logprobs is not None else params
        return [
            Request(
                id=groups.child_id(request_id, index, count), prompt=prompt.ids, params=unscored if index else params,
                max_total=min(room, self.max_model_len), eos_ids=self.eos_ids, seed=groups.child_seed(seed, index), arrival=arrival,
                priority=priority, tenant=tenant, bad_words=bad_words, cache_salt=prompt.cache_salt,
                fork_of=groups.child_id(request_id, 0, count) if index else "",
            )
            for index in range(count)
        ]

    def _tokens(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """encode(), and the model has every one of the ids: a tokenizer may have more than the model's embedding has rows."""
        ids = self.encode(text, param, add_special_tokens=add_special_tokens)
        if ids and max(ids) >= self.vocab:
            token = next(token for token in ids if token >= self.vocab)
            piece = self.tokenizer.id_to_token(token) if self.tokenizer is not None else None
            raise InvalidRequest(
                f"{param} holds {'a token' if piece is None else shown(piece)} that the tokenizer gives the id {token}; "
                f"the model's vocabulary has the ids 0 to {self.vocab - 1}", param,
            )
        return ids

    @staticmethod
    def check_tenant(tenant: Any, param: str = "tenant") -> None:
        """Whether this can be a tenant's name; "" is the one that all without a name share. Raises: InvalidRequest."""
        if not isinstance(tenant, str):
            raise InvalidRequest(f"{param} must be a string, not {type(tenant).__name__}", param)
        if len(tenant) > MOST_TENANT_CHARS:
            raise InvalidRequest(f"{param} has {len(tenant)} characters; at most {MOST_TENANT_CHARS} are accepted", param)
        if any("\ud800" <= char <= "\udfff" for char in tenant):
            raise InvalidRequest(f"{param} holds half of a surrogate pair, which is no text", param)

    def _check_ids(self, given: Any) -> list[int]:
        if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__iter__"):
            raise InvalidRequest(f"a prompt is a string, token ids or a dictionary of one of them, not {type(given).__name__}", "prompt")
        ids = given.tolist() if hasattr(given, "tolist") else list(given)
        for place, token in enumerate(ids):
            if type(token) is not int:
                if isinstance(token, bool) or not hasattr(token, "__index__"):
                    raise InvalidRequest(f"prompt_token_ids[{place}] must be a token id, not {shown(token)}", "prompt_token_ids")
                ids[place] = token = int(token)
            if not 0 <= token < self.vocab:
                raise InvalidRequest(
                    f"prompt_token_ids[{place}] is {shown(token)}; the vocabulary has the ids 0 to {self.vocab - 1}", "prompt_token_ids",
                )
        return ids

    def _check_length(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise InvalidRequest(f"{param} is empty: at least one token is needed", param)
        if len(ids) >= self.max_model_len:
            raise ContextTooLong(
                f"the prompt has {len(ids)} tokens; the context holds {self.max_model_len}, prompt and output together, "
                f"so a prompt may have at most {self.max_model_len - 1}", param,
            )
        return ids

    def _check_logprobs(self, wanted: int | None, name: str) -> None:
        if wanted is None or self.max_logprobs < 0:
            return
        most = min(self.max_logprobs, self.vocab)
        asked = self.vocab if wanted < 0 else wanted
        if asked > most:
            what = f"-1, the whole vocabulary of {self.vocab}," if wanted < 0 else shown(wanted)
            raise InvalidRequest(f"{name} is {what} above this engine's limit of {most} (the setting max_logprobs)", name)

    def _check_beams(self, params: SamplingParams) -> None:
        """Whether the runner can give what a search of this width needs at each step."""
        width, field = params.beam_width, params.width_field
        if width > self._max_num_seqs:
            raise InvalidRequest(
                f"{field} is {width}: a beam search runs as many sequences at once, and at most {self._max_num_seqs} run (the setting max_num_seqs)",
                field,
            )
        ends = self.eos_ids.union(params.stop_token_ids)
        if width > (left := self.vocab - len(ends)):
            raise InvalidRequest(f"{field} is {width}: the vocabulary has {left} tokens that do not end a beam", field)
        need = beams.num_alternatives(width, len(ends), len(ends))
        if (most := max(MOST_CANDIDATES, self.max_logprobs)) < min(need, self.vocab) and self.max_logprobs >= 0:
            raise InvalidRequest(
                f"{field} is {width} and {len(ends)} tokens may end a beam: that is {need} candidates a beam; at most {most} are looked at "
                f"(raise the setting max_logprobs)", field,
            )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the start of a text and, where that is another token sequence of the same
        length, after a space: vLLM's rule, so that the same words are kept out."""
        found: list[tuple[int, ...]] = []
        for word in words:
            bare, spaced = (tuple(self._tokens(lead + word.lstrip(), "bad_words", add_special_tokens=False)) for lead in ("", " "))
            if not bare:
                raise InvalidRequest(f"bad_words holds {word!r}, which has no tokens", "bad_words")
            found.append(bare)
            if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return tuple(dict.fromkeys(found))

    def _check_choice(self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> None:
        """Some token must be allowed at every position; phrases of several tokens give way (runner/masks.py)."""
        if params.allowed_token_ids is None and not bad_words and not params.min_tokens:
            return
        if params.allowed_token_ids is None and len(bad_words) + len(self.eos_ids) + len(params.stop_token_ids) < self.vocab:
            return  # they cannot ban every token
        left = set(range(self.vocab)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
        left.difference_update(word[0] for word in bad_words if len(word) == 1)
        if not left:
            raise InvalidRequest("bad_words leave no token that could be chosen", "bad_words")
        if params.min_tokens and not left.difference(self.eos_ids, params.stop_token_ids):
            raise InvalidRequest(
                f"min_tokens ({shown(params.min_tokens)}) bans the end and stop tokens until then, and no other token is allowed", "min_tokens",
            )


def cache_salt(given: Any) -> str:
    """A caller's cache_salt; empty where there is none. Raises: InvalidRequest for an empty one, or no text."""
    if given is None:
        return ""
    if not isinstance(given, str) or not given:
        raise InvalidRequest(f"cache_salt must be a non-empty string, or be left out, not {shown(given)}", "cache_salt")
    return given
