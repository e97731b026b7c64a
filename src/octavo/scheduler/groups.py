"""BeamGroup: the requests of one beam search, which are scheduled as a whole.

Each beam is a plain request; the group says which of them compute, and what they take over from each other. Its first request, the leader,
stands for all of them in the queue and before the policy.

    admitted     the leader computes the prompt; the others hold a slot and the blocks that they will need, and are idle
    at its end   the leader's row gives all beams: the others take over its K and V
    then         a beam whose row is in has nothing to compute until the rows of all are in; then the search selects. The first child of
                 a beam keeps its request; the requests of beams that have no child go to the other children
    resumed      after a preemption all beams are there at once: the leader computes what all have in common (the trunk), then the others
                 take that over and compute the rest

Taking over (``kv.fork``): full blocks are shared and the begun one is copied. Whoever takes over first gives up its own table, in which the
begun block, if there is one, was its own. So what it gives up pays for the copy, and taking over never lacks a block.
"""

from collections.abc import Callable

from octavo.core.output import Delta, LogprobRow
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.kv.manager import NO_MATCH, KvManager, Match
from octavo.scheduler.beams import BeamSearch

ComeBack = Callable[[Request, list[int], int, int], int]  # a request, its table, the tokens that are there, the most → the tokens that are there then


class BeamGroup:
    """The state of one group, which the Scheduler alone changes."""

    def __init__(self, leader: Request, block_size: int) -> None:
        params = leader.params
        ends: dict[int, int | None] = {token: token for token in params.stop_token_ids}
        if not params.ignore_eos:
            ends |= dict.fromkeys(leader.eos_ids)
        self.leader = leader
        self.width = params.beam_width
        self.members = [leader]
        self.search = BeamSearch(
            self.width, ends, most_tokens=leader.limit - leader.num_prompt, length_penalty=params.length_penalty,
            early_stopping=params.early_stopping, banned=leader.eos_ids | frozenset(params.stop_token_ids), min_tokens=params.min_tokens,
            shown=params.logprobs or 0,
        )
        self._size = block_size
        self._beams = [leader]  # in the search's order
        self._rows: dict[Request, LogprobRow] = {}  # those that are in
        self._trunk: int | None = None  # leading tokens that the others wait for the leader to compute

    @property
    def complete(self) -> bool:
        """Whether all members are here."""
        return len(self.members) == self.width

    @property
    def waits(self) -> bool:
        """Whether the others wait for the leader to compute what all share."""
        return self._trunk is not None

    @property
    def others(self) -> list[Request]:
        """All but the leader."""
        return self.members[1:]

    def told(self, request: Request) -> SamplingParams:
        """What the runner is told: to give enough alternatives of the raw distribution. All else is decided here."""
        params = request.params
        shown = params.logprobs or 0
        logprobs = -1 if shown < 0 else max(shown, self.search.needs)
        return SamplingParams(use_beam_search=True, temperature=0.0, logprobs=logprobs, prompt_logprobs=params.prompt_logprobs)

    # -- admission

    def reserve(self, kv: KvManager) -> int:
        """Blocks that each of the others is to hold from admission on: what it will not share, its next token's place included."""
        leader, size = self.leader, self._size
        self._trunk = None
        if len(self._beams) > 1:  # a window may have left behind what all share
            self._trunk = self._common() // size * size if kv.window is None else 0
        shared = leader.num_prompt if self._trunk is None else self._trunk
        covered = min(len(leader.tokens) + 1, leader.limit - 1)
        return max(1, kv.blocks_for(covered) - shared // size)

    def _common(self) -> int:
        """Leading tokens that all beams share."""
        first, *rest = (beam.tokens for beam in self._beams)
        common = len(first)
        for tokens in rest:
            common = next((place for place in range(common) if tokens[place] != first[place]), common)
        return common

    def take_trunk(self, kv: KvManager, come_back: ComeBack) -> bool:
        """Once the leader has computed what all share, and it was not taken over yet: the others do, and go on from there. Whether they did."""
        trunk, leader = self._trunk, self.leader
        if trunk is None or leader.num_computed < trunk:
            return False
        self._trunk = None
        for request in self.others:
            match = kv.match(request.tokens, request.block_keys)
            if trunk >= match.num_tokens:
                match = kv.fork(leader.id, trunk) if trunk else NO_MATCH
            elif trunk:  # where the cache has doubles of the leader's blocks, those are in use already, and cost nothing
                match = Match(match.num_tokens, [*kv.fork(leader.id, trunk).blocks, *match.blocks[trunk // self._size :]])
            kv.release(request.id)
            table = kv.admit(request.id, match, min(len(request.tokens) + 1, request.limit - 1), keys=request.block_keys)
            assert table is not None, f"{request.id} has given up fewer blocks than it needs"
            request.num_computed = come_back(request, table, match.num_tokens, len(request.tokens))
            kv.grow(request.id, request.num_computed)
            request.idle = False
        return True

    # -- selection

    def row_in(self, request: Request, row: LogprobRow) -> bool:
        """A beam's row is in. Whether those of all are."""
        self._rows[request] = row
        return len(self._rows) == len(self._beams)

    def reset(self) -> None:
        """The beams have lost their blocks: they keep their tokens, and rows that are in will be computed again."""
        self._rows.clear()
        self._trunk = None

    def select(self, kv: KvManager) -> "list[tuple[Request, tuple[int, int] | None]] | None":
        """Let the search choose, and make the members its beams. Returns those that took over from another, each with the blocks to copy
        (from, to), or None where none is begun; None when the search is over.
        """
        rows, self._rows = self._rows, {}
        children = self.search.step([rows[beam] for beam in self._beams])
        if not children:
            return None
        assert len(children) == self.width, f"{len(children)} continuations for {self.width} beams: the vocabulary is too small"
        parents = {self._beams[place] for place, _ in children}
        spare = [member for member in self.members if member not in parents]
        kept: set[Request] = set()
        beams: list[Request] = []
        moved: list[tuple[Request, tuple[int, int] | None]] = []
        for place, _ in children:
            parent = self._beams[place]
            if parent in kept:
                heir = spare.pop()
                moved.append((heir, _take_over(kv, heir, parent)))
                beams.append(heir)
            else:
                kept.add(parent)
                beams.append(parent)
        for beam, (_, token) in zip(beams, children, strict=True):  # only now: who took over has its parent's tokens without the new one
            beam.tokens.append(token)
            beam.known = len(beam.tokens)
        self._beams = beams
        return moved

    def check(self, kv: KvManager) -> None:
        """Restate the invariants: whoever has something to compute is a beam, beams are equally long, and whoever waits holds what it will need.

        Raises: AssertionError.
        """
        assert len({len(beam.tokens) for beam in self._beams}) == 1, "beams of different lengths"
        assert len({tuple(beam.tokens) for beam in self._beams}) == len(self._beams), "two beams are alike"
        assert self._rows.keys() <= set(self._beams) and len(self._rows) < len(self._beams), "a selection is due"
        for member in self.members:
            assert not member.ahead, f"{member.id} is planned ahead of a selection"
            if member.slot >= 0:
                assert member.idle or member in self._beams, f"{member.id} is no beam and computes"
                assert not member.idle or (kv.table(member.id) and member.num_computed == 0), f"{member.id} waits and has computed something"

    def deltas(self) -> list[Delta]:
        """The last Delta of each member once the search is over: the hypotheses, best first."""
        found = []
        for request, hypothesis in zip(self.members, self.search.finished, strict=True):
            rows = hypothesis.path.rows()
            found.append(Delta(
                request.id, [row.token for row in rows], rows, None, hypothesis.finish_reason, hypothesis.stop_reason, request.num_cached,
            ))
        return found


def _take_over(kv: KvManager, heir: Request, parent: Request) -> tuple[int, int] | None:
    """Give a request all that another has computed. Returns the block to copy (from, to), None where none is begun."""
    freed = kv.release(heir.id)
    match = kv.fork(parent.id, parent.num_computed)
    heir.block_keys = None if parent.block_keys is None else list(parent.block_keys)
    table = kv.admit(heir.id, match, match.num_tokens + (freed > 0), keys=heir.block_keys)  # the next token's place, where it gave one up
    assert table is not None, f"{heir.id} has given up fewer blocks than it needs"
    heir.tokens = list(parent.tokens)
    heir.num_computed = match.num_tokens
    heir.idle = False
    return None if match.tail is None else (match.tail, table[len(match.blocks)])
