"""The ops that a model is written in, and the step's arrays that they read. No tensor library here.

Legend: T tokens of the step, S sequences, R sampled (or scored) rows, d hidden size, H query heads, G KV heads,
D head size, F feed-forward size, V vocabulary. "act" is the compute dtype: bfloat16, or float32 in float32 mode.

A provider (ops/native.py, ops/torch_ops.py) gives the model function an object that has these methods. Handles are
opaque: a model never sees a row count, the step's metadata or a tensor. The native provider records the calls once
into a program; the torch provider executes them at every step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Handle = Any


class Ops(Protocol):
    """What a model file may call. Rounding to act happens only where said here (design: numeric contract)."""

    def embed(self, table: Handle) -> Handle:
        """Rows of the table for the step's tokens. → [T, d] float32, the residual stream."""

    def norm(self, x: Handle, weight: Handle, eps: float) -> Handle:
        """RMSNorm in float32, rounded to act. [n, d] float32 → [n, d] act. Source: Zhang & Sennrich 2019."""

    def linear(self, x: Handle, weight: Handle, *, bias: Handle | None = None, act: str | None = None,
               residual: Handle | None = None) -> Handle:
        """``x @ weight.T (+ bias)``, accumulated in float32. [n, K] act × [N, K].

        act None → [n, N] float32. act "silu_mul": the weight is gate and up stacked (rows), the result
        silu(gate)·up, [n, N/2] act. residual → residual + result, float32, the new residual stream.
        """

    def rope_store(self, qkv: Handle, layer: int, rope: Any) -> Handle:
        """Rotate q and k (halves convention), round q, k and v to act, write k and v to the cache. → q [T, H·D] act.

        Source: Su et al. 2021; Kwon et al. 2023, section 4.1 (block tables).
        """

    def attention(self, q: Handle, layer: int, window: int | None) -> Handle:
        """Causal attention of each token over its own sequence, read from the cache. [T, H·D] act → [T, H·D] act.

        A query at position p sees keys at positions max(0, p - window + 1) … p. Scale 1/sqrt(D).
        """

    def take_rows(self, x: Handle) -> Handle:
        """The rows to sample or score. [T, d] float32 → [R, d] float32. Afterwards ops work on R rows."""

    def head(self, x: Handle, weight: Handle) -> Handle:
        """Logits and then the sampler, in tiles of at most 64 rows: the *sample* segment. [R, d] act → outputs."""


# name → (numpy dtype, dimensions). Written by runner/batch.py before a step, read by the provider.
# "T" is max_num_batched_tokens, "S" is max_num_seqs, "R" as T; header = [T, S, R, most alternatives wanted (-1: none)] now.
STEP_FIELDS: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "header": ("i4", (16,)),
    "tokens": ("i4", ("T",)),  # input ids, all known (the runner has put a slot's last token where the plan says -1)
    "positions": ("i4", ("T",)),  # absolute
    "kv_slots": ("i4", ("T",)),  # where K and V go: block id · block size + offset
    "q_start": ("i4", ("S+1",)),  # sequence s owns tokens q_start[s] … q_start[s+1] - 1
    "seq_slot": ("i4", ("S",)),  # its row in the slot arrays
    "kv_len": ("i4", ("S",)),  # its tokens in the cache after this step
    "rows": ("i4", ("R",)),  # which tokens' rows go to the head, ascending
    "row_slot": ("i4", ("R",)),
    "row_pos": ("i4", ("R",)),  # position of the token that this row predicts: the counter of its random number
    "row_target": ("i4", ("R",)),  # -1: sample. Else: give this id's raw log-probability (prompt_logprobs)
    "row_top": ("i4", ("R",)),  # alternatives wanted; -1: no log-probabilities at all
    # written by the provider
    "out_token": ("i4", ("R",)),
    "out_logprob": ("f4", ("R",)),  # of the raw distribution, before masks, penalties and temperature
    "out_rank": ("i4", ("R",)),  # 1 + number of ids with a larger raw logit
    "top_ids": ("i4", ("R", "K")),  # K: max_logprobs; the row's first row_top entries are valid
    "top_logprobs": ("f4", ("R", "K")),
}

# Resident per slot, first dimension S; written by runner/slots.py.
SLOT_FIELDS: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "block_table": ("i4", ("S", "B")),  # B: blocks of the longest sequence
    "temperature": ("f4", ("S",)),
    "top_k": ("i4", ("S",)),  # 0: off
    "top_p": ("f4", ("S",)),
    "min_p": ("f4", ("S",)),
    "repetition": ("f4", ("S",)),
    "presence": ("f4", ("S",)),
    "frequency": ("f4", ("S",)),
    "seed": ("u8", ("S",)),
    "mask": ("u8", ("S",)),  # address of ceil(V/32) uint32 words, bit set = allowed; 0: everything is allowed
    "bias": ("u8", ("S",)),  # address of V float32 that are added to the logits; 0: none
    "seen_ids": ("u8", ("S",)),  # address of num_seen int32: distinct tokens of prompt and output; penalties only
    "seen_counts": ("u8", ("S",)),  # address of num_seen int32: how often in the *output* (0: prompt only)
    "num_seen": ("i4", ("S",)),
}


class Program(Protocol):
    """A model bound to weights, arrays and a KV store. Called by the runner, one step at a time.

    Sampler order: mask, bias, penalties, temperature, min_p, top_k, top_p; then the inverse of the cumulative
    distribution, in id order, at one Philox4x32-10 uniform of (seed, row_pos). Greedy (temperature 0): the largest
    logit after mask, bias and penalties, ties to the lowest id.
    """

    def forward(self) -> None:
        """Everything up to the normed rows that the head needs."""

    def sample(self) -> None:
        """Head and sampler: fills the out_* and top_* arrays for R rows."""


class KvStore(Protocol):
    """The memory behind the blocks; the provider chose its layout."""

    num_blocks: int
    block_bytes: int


class Provider(Protocol):
    """Loads weights into its own format and binds models. Host tensors are numpy: float32, or uint16 holding bfloat16 bits."""

    def linear(self, parts: Sequence[Any], *, interleave: bool = False) -> Handle:
        """A matrix [N, K], given as parts stacked along N. ``interleave``: two parts, gate and up, for act="silu_mul"."""

    def table(self, table: Any) -> Handle:
        """An embedding table [V, d], also usable as the head's matrix (tied)."""

    def vector(self, parts: Sequence[Any]) -> Handle:
        """A norm weight or a bias, parts joined; kept in float32."""

    def kv_store(self, kv_spec: Any, num_blocks: int) -> KvStore:
        """Memory for the blocks, committed when first touched."""

    def compile(self, model: Callable[..., Any], weights: Any, spec: Any, *, step: Mapping[str, Any], slots: Any,
                kv: KvStore) -> Program:
        """Bind. ``step``: the STEP_FIELDS arrays by name. ``slots``: runner.slots.Slots; its ``arrays`` are the SLOT_FIELDS,
        its lists ``mask``, ``bias`` and ``seen`` hold the arrays behind the addresses (None where the address is 0)."""
