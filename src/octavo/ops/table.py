"""The ops that a model is written in, and the step's arrays that they read. No tensor library here.

Legend: T tokens of the step, S sequences, R sampled (or scored) rows, d hidden size, H query heads, G KV heads,
D head size, F feed-forward size, V vocabulary. "act" is the compute dtype: bfloat16, or float32 in float32 mode.

KV types. The cache holds K after RoPE, and V: in act or bfloat16, rounded; or quantized from their float32 values, by token and
KV head, K and V apart. A value then is code · scale; m is the row's largest magnitude, and scales are rounded up:
  fp8_e4m3  scale m/448 as a power of two; codes to nearest even, 448 at most
  int8      scale m/127 as bfloat16; codes -127 … 127, to nearest even
  int4      scale ±m/8 as bfloat16, so that the value of magnitude m is -8; codes -8 … 7
Before that, K is centred: the key heads' bias is subtracted in the dims that rotate by less than 2^-13 a token (i and i + D/2 where
inv_freq[i] is that small). One vector less in all keys is one number less in all scores of a query, which a softmax does not see: so
attention reads centred keys. For int8 and int4, K is then spread, and where it is read spread again: the Walsh-Hadamard transform of
each 32 dims, divided by 32 when written (the native kernels spread the query instead of reading).
A scale below 2^-60 is 0; a row with a NaN or an infinity has a scale of NaN. Every token reads what the cache holds, its own step's too.

A provider (ops/native.py, ops/torch_ops.py) gives the model function an object that has these methods. Handles are
opaque: a model never sees a row count, the step's metadata or a tensor. The native provider records the calls once
into a program; the torch provider executes them at every step.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Handle = Any

# The version of the numeric contract (docs/decisions/0002). Raise it with every change by which a kernel gives other bits for the same
# inputs: what is kept of computed numbers (K and V of the prefix cache) is told apart by it.
NUMERIC_CONTRACT = 6


class Ops(Protocol):
    """What a model file may call. Rounding to act happens only where said here (design: numeric contract)."""

    def embed(self, table: Handle) -> Handle:
        """Rows of the table for the step's tokens. → [T, d] float32, the residual stream."""

    def norm(self, x: Handle, weight: Handle, eps: float) -> Handle:
        """RMSNorm, ``x / sqrt(mean(x²) + eps) · weight`` in float32, rounded to act once. [n, d] float32 → [n, d] act.

        Source: Zhang & Sennrich 2019.
        """

    def linear(self, x: Handle, weight: Handle, *, bias: Handle | None = None, act: str | None = None,
               residual: Handle | None = None) -> Handle:
        """``x @ weight.T (+ bias)``, accumulated in float32. [n, K] act × [N, K].

        act None → [n, N] float32. act "silu_mul": the weight is gate and up stacked (rows), the result
        silu(gate)·up in float32, rounded to act, [n, N/2]; its bias is gate's and up's, one after the other.
        residual → residual + result, float32, the new residual stream.

        A quantized weight: each row of x is quantized by groups first (8 bits, symmetric, scale = largest magnitude / 127; for int8
        spread, and as a whole), from its act values; sums of products are whole numbers inside a group. See docs/decisions/0010.
        """

    def rope_store(self, qkv: Handle, layer: int, rope: Any, bias: Handle | None = None) -> Handle:
        """Rotate q and k (halves convention), write k and v to the cache in its type, round q to act. → q [T, H·D] act.

        qkv [T, (H + 2·G)·D] float32: the query heads, the key heads, the value heads. The angle is the float32 product
        position · inv_freq[i]; with its cosine c and sine s, (a, b) = (x[i], x[i + D/2]) becomes (a·c - b·s, b·c + a·s).
        ``bias`` [(H + 2·G)·D] float32 is what qkv has in it already (see KV types).

        Source: Su et al. 2021; Kwon et al. 2023, section 4.1 (block tables).
        """

    def attention(self, q: Handle, layer: int, window: int | None) -> Handle:
        """Causal attention of each token over its own sequence, read from the cache. [T, H·D] act → [T, H·D] act.

        A query at position p sees keys at positions max(0, p - window + 1) … p. Scale 1/sqrt(D), applied to the scores.
        Query head h reads KV head h // (H/G). Softmax in partitions of 256 absolute positions, combined left to right: in
        one, m = max of the scores, P = exp(score - m) rounded to act, and both the sum of P and P·V (in float32) use the
        rounded P. The quotient is rounded to act once, at the end.
        Masked positions are left out by selection: what the cache holds beyond a sequence's kv_len, or before all its windows,
        has no influence, NaN neither.

        Source: Milakov & Gimelshein 2018 (online softmax).
        """

    def take_rows(self, x: Handle) -> Handle:
        """The rows to sample or score. [T, d] → [R, d], float32 or act. Ops over it work on R rows."""

    def head(self, x: Handle, weight: Handle) -> Handle:
        """Logits (float32) and then the sampler, in tiles of at most 64 rows: the *sample* segment. [R, d] act → outputs."""


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
    "row_top": ("i4", ("R",)),  # alternatives wanted; -1: no log-probabilities at all (but a target's)
    # written by the provider
    "out_token": ("i4", ("R",)),  # the token chosen, or the target; -1: the row's logits are no numbers, and nothing else of it is set
    "out_logprob": ("f4", ("R",)),  # of the raw distribution, before masks, penalties and temperature; unset with row_top -1 and no target
    "out_rank": ("i4", ("R",)),  # 1 + number of ids with a larger raw logit; unset as above
    "top_ids": ("i4", ("R", "K")),  # K: max_logprobs; the row's first row_top entries are valid, by falling logit, ties by rising id
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

    Sampler, for a row with row_target -1, on its float32 logits x; every operation is rounded to float32:

    1. mask: ids whose bit is clear get -inf (bit i % 32 of word i // 32). Then bias: x + bias.
    2. penalties, for the seen ids with their output count n: x / repetition where x > 0, else x · repetition; then
       x - frequency · n; then x - presence where n > 0.
    3. temperature 0: the largest x, ties to the lowest id; done (min_p, top_k and top_p cannot change it).
    4. e = exp((x - max x) / temperature): the most likely id has e = 1. min_p: keep e >= min_p.
    5. weights are whole numbers, so that no sum of them has an order: q = floor(e · 2^30 + 1/2). Ids with q = 0 take no part.
    6. top_k > 0: keep the k first by falling x, ties by rising id (exactly k, where vLLM keeps all that tie with the k-th).
    7. top_p < 1: by falling x, ties by rising id, keep the shortest run whose q reach ceil(top_p · (sum of the kept q)), at
       least 1; the id that crosses is in. (The product is one of doubles.)
    8. the lowest kept id whose cumulative q, in id order, exceeds floor(u · (sum of the kept q)), u the uniform below.

    A row is broken when one of its raw logits is a NaN, or the largest of them is infinite: its out_token is -1, also where a
    target is given, and nothing else of it is set. Mask, bias and penalties make infinities of numbers at most: among
    infinite logits the lowest id is taken, and where no id is left above -inf, the lowest that the mask allows, or else 0.

    Philox4x32-10: key = (seed's low 32 bits, its high 32 bits), counter = (row_pos, 0, 0, 0); u = (out[0] >> 8) / 2^24, a whole
    number over 2^24, so that rule 8 is exact.
    Source: Salmon et al. 2011.

    Log-probabilities are x - logsumexp(x) of the raw logits, for the chosen token or the target (row_target >= 0: nothing
    is sampled, out_token is the target).
    """

    def forward(self) -> None:
        """Everything up to the normed rows that the head needs."""

    def sample(self) -> None:
        """Head and sampler: fills the out_* and top_* arrays for R rows."""

    def run(self) -> None:
        """forward and sample in one call: for steps in which the host has nothing to do between them."""


class KvStore(Protocol):
    """The memory behind the blocks; the provider chose its layout."""

    num_blocks: int
    block_bytes: int

    def copy_block(self, source: int, target: int) -> None:
        """K and V of all layers, bit for bit. Cost: 2 · block_bytes of memory traffic."""

    def read_block(self, block: int) -> memoryview:
        """A block's bytes, ``block_bytes`` of them; only until anything is written."""

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a block with bytes that read_block gave, of this store or of one of the same kind and shape."""


class Stored(NamedTuple):
    """A matrix as its file holds it. ``raw``: uint8 [rows, bytes of a row]. ``numbers()``: the same, dequantized to float32."""

    type: str  # "Q4_0", …
    raw: Any
    shape: tuple[int, ...]
    numbers: Callable[[], Any]


class Provider(Protocol):
    """Loads weights into its own format and binds models. Host tensors are numpy: float32, or uint16 holding bfloat16 bits."""

    quantization: str | None

    def keeps(self, types: Sequence[str], shapes: Sequence[tuple[int, ...]], interleave: bool) -> bool:
        """Whether ``linear`` and ``table`` take these parts as ``Stored``, in the types that the file has."""

    def linear(self, parts: Sequence[Any], *, interleave: bool = False) -> Handle:
        """A matrix [N, K], given as parts stacked along N (all of them ``Stored``, or none). ``interleave``: two parts, gate
        and up, for act="silu_mul". Quantized, if the provider was made so."""

    def table(self, table: Any) -> Handle:
        """An embedding table [V, d], also usable as the head's matrix (tied), or the head's own. At least 8 bits, unless stored in fewer."""

    def vector(self, parts: Sequence[Any]) -> Handle:
        """A norm weight or a bias, parts joined; kept in float32."""

    def kv_store(self, kv_spec: Any, num_blocks: int) -> KvStore:
        """Memory for the blocks, committed when first touched."""

    def compile(self, model: Callable[..., Any], weights: Any, spec: Any, *, step: Mapping[str, Any], slots: Any,
                kv: KvStore) -> Program:
        """Bind. ``step``: the STEP_FIELDS arrays by name. ``slots``: runner.slots.Slots; its ``arrays`` are the SLOT_FIELDS,
        its lists ``mask``, ``bias`` and ``seen`` hold the arrays behind the addresses (None where the address is 0)."""


class Cost(NamedTuple):
    """What an op moves and computes: bytes from and to memory, each operand once, and floating-point operations."""

    bytes: float
    flops: float

    def __add__(self, other: object) -> "Cost":  # a tuple's own + would join them
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def times(self, count: float) -> "Cost":
        """The cost of ``count`` such ops."""
        return Cost(self.bytes * count, self.flops * count)


F32 = 4  # bytes


def embed_cost(rows: int, hidden: int, weight_bytes: float) -> Cost:
    """Rows of the table read, float32 written. ``weight_bytes``: per weight, here and below (a fraction for int4)."""
    return Cost(rows * hidden * (weight_bytes + F32), 0)


def norm_cost(rows: int, hidden: int, act_bytes: int) -> Cost:
    """Read float32 and the weight, write act; square, sum, scale, weight."""
    return Cost(rows * hidden * (F32 + act_bytes) + hidden * F32, 4 * rows * hidden)


def linear_cost(rows: int, n: int, k: int, weight_bytes: float, act_bytes: int, *, act: str | None = None, residual: bool = False) -> Cost:
    """The matrix once, inputs and outputs once: [rows, k] × [n, k]."""
    out = rows * n / 2 * act_bytes if act == "silu_mul" else rows * n * F32 * (2 if residual else 1)
    return Cost(n * k * weight_bytes + rows * k * act_bytes + out, 2 * rows * n * k)


def rope_store_cost(rows: int, heads: int, kv_heads: int, head_dim: int, act_bytes: int, kv_bytes: float) -> Cost:
    """Read q, k and v in float32, write q in act and k and v to the cache."""
    q, kv = rows * heads * head_dim, rows * kv_heads * head_dim
    return Cost((q + 2 * kv) * F32 + q * act_bytes + 2 * kv * kv_bytes, 3 * (q + kv))


def attention_cost(rows: int, spans: Iterable[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, act_bytes: int, kv_bytes: float,
                   window: int | None = None) -> Cost:
    """``spans``: per sequence, its rows in this step and its tokens in the cache after it. K and V are read once per sequence."""
    pairs = context = 0
    for new, length in spans:
        pairs += visible_pairs(new, length, window)
        context += length if window is None else min(length, window + new - 1)
    kv = 2 * context * kv_heads * head_dim * kv_bytes
    return Cost(kv + 2 * rows * heads * head_dim * act_bytes, pairs * heads * (4 * head_dim + 4))


def visible_pairs(new: int, length: int, window: int | None = None) -> int:
    """Pairs of query and key: the last ``new`` of ``length`` positions, each seeing itself and what is before it (in the window)."""
    first = length - new + 1  # keys that the first query sees
    if window is None or length <= window:
        return new * (first + length) // 2
    growing = max(0, window - first + 1)  # queries that see fewer than window keys, or just as many
    return growing * (first + first + growing - 1) // 2 + (new - growing) * window


def head_cost(rows: int, vocab: int, hidden: int, weight_bytes: float, act_bytes: int, *, tile: int = 64) -> Cost:
    """Logits and one pass of the sampler; the matrix is read once per tile of rows."""
    tiles = math.ceil(rows / tile)
    return Cost(tiles * vocab * hidden * weight_bytes + rows * (hidden * act_bytes + vocab * F32), 2 * rows * vocab * hidden + 2 * rows * vocab)
