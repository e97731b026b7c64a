"""The KV types restated in numpy float32: what a block holds, and attention over it, bit for bit."""

import numpy as np
from tests.ops.native_support import act, contract_exp, contract_product, contract_sum16, f32

KV_TYPES = {"bfloat16": ("bfloat16", "fp8_e4m3", "int8", "int4"), "float32": ("float32", "bfloat16", "fp8_e4m3", "int8", "int4")}  # by act
PAIRS = [(dtype, kv) for dtype, kvs in KV_TYPES.items() for kv in kvs]
LEAST = f32(2.0**-60)


def upwards(x, below):
    return ((np.asarray(x, f32).view(np.uint32) + np.uint32(below)) & ~np.uint32(below)).view(f32)


def e4m3(x):
    """Bits of the nearest e4m3 value, ties to even, 448 at most; by search over all of them."""
    codes = np.arange(127)
    values = np.where(codes < 8, codes * 2.0**-9, (8 + codes % 8) * 2.0 ** (codes // 8 - 10.0))
    mag = np.minimum(np.abs(np.asarray(x, np.float64)), 448)
    high = np.minimum(np.searchsorted(values, mag), 126)
    low = np.maximum(high - 1, 0)
    below, above = mag - values[low], values[high] - mag
    best = np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    return (best | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def e4m3_values(bits):
    mag = (bits & 127).astype(np.int64)
    value = np.where(mag < 8, mag * 2.0**-9, (8 + mag % 8) * 2.0 ** (mag // 8 - 10.0))
    return np.where(bits & 128, -value, value).astype(f32)


def quantize(x, kv):
    """x [..., D] → (values of the codes, scales [...]), float32."""
    most = np.abs(x).max(-1)
    if kv == "fp8_e4m3":
        scale = upwards(most / f32(448), 0x7FFFFF)
    else:
        scale = upwards(most / f32(127 if kv == "int8" else 8), 0xFFFF)
        if kv == "int4":
            scale = np.where(x.max(-1) >= -x.min(-1), -scale, scale)
    scale = np.where(np.abs(scale) < LEAST, f32(0), scale)
    inverse = np.divide(f32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    ratio = x * inverse[..., None]
    if kv == "fp8_e4m3":
        return e4m3_values(e4m3(ratio)), scale
    return np.clip(np.rint(ratio), *((-127, 127) if kv == "int8" else (-8, 7))).astype(f32), scale


def spread(x):
    """The Walsh-Hadamard transform of each 32 of the last axis (padded with zeros to that), largest distance first."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)])
    shape = x.shape
    for apart in (16, 8, 4, 2, 1):
        pairs = x.reshape(*shape[:-1], -1, 2, apart)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([low + high, low - high], -2)
    return x.reshape(shape)


def whole(x):
    """The last axis as 16-bit whole numbers by its largest magnitude, and what 1 stands for."""
    most = np.abs(x).max(-1).astype(f32)
    small = most < LEAST
    inverse = np.divide(f32(32767), most, out=np.zeros_like(most), where=~small)
    return np.rint(x * inverse[..., None]).astype(np.int64), np.where(small, f32(0), most / f32(32767))


class Cached:
    """K and V [T, G, D] as the cache of this type has them. ``k``, ``v``: float32 before rounding; ``center`` [G, D]: subtracted from K."""

    def __init__(self, k, v, dtype, kv, center):
        self.dtype, self.kv = dtype, kv
        self.integer = kv in ("int8", "int4")
        if kv in ("bfloat16", "float32"):
            self.k, self.v = act(k, kv), act(v, kv)
            return
        k = k - center
        if self.integer:
            k = spread(k) * f32(1 / 32)
        (self.k_codes, self.k_scale), (self.v_codes, self.v_scale) = quantize(k, kv), quantize(v, kv)
        self.k, self.v = self.k_codes * self.k_scale[..., None], self.v_codes * self.v_scale[..., None]

    def scores(self, q, g, scale):
        """q [T, D] of act precision → [T, T'] float32."""
        if not self.integer:  # fp8's scales are powers of two: where they are multiplied in has no influence
            padded = -(-q.shape[-1] // 32) * 32
            return contract_product(np.pad(q, ((0, 0), (0, padded - q.shape[-1]))), self.k[:, g]) * scale
        n, unit = whole(spread(q))
        dots = (n @ self.k_codes[:, g].astype(np.int64).T).astype(f32)
        return dots * self.k_scale[:, g] * (scale * unit)[:, None]

    def weigh(self, p, at, seen, g):
        """One partition: p, 0 where not seen, over the tokens ``at`` → (mass, output [D])."""
        v, part = np.zeros((len(at), self.v.shape[-1]), f32), at[at < len(self.v)]
        p = act(p, self.dtype)
        if not self.integer:
            v[: len(part)] = self.v[part, g]
            v[~seen] = 0
            return contract_sum16(p), contract_product(p[None], np.ascontiguousarray(v.T), 16)[0]
        scales = np.zeros(len(at), f32)
        v[: len(part)], scales[: len(part)] = self.v_codes[part, g], self.v_scale[part, g]
        n, unit = whole(np.where(seen, p * scales, f32(0)))
        return contract_sum16(p), (n @ v.astype(np.int64)).astype(f32) * unit


def rotated(spec, qkv):
    """q [T, H, D], k and v [T, G, D], float32 before any rounding."""
    h, g, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    x = qkv.reshape(len(qkv), h + 2 * g, d)
    angle = np.arange(len(qkv), dtype=f32)[:, None] * np.array(spec.rope.inv_freq, f32)
    cos, sin = (fn(angle.astype(float)).astype(f32)[:, None] for fn in (np.cos, np.sin))
    low, high = x[..., : d // 2], x[..., d // 2 :]
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    return turned[:, :h], turned[:, h : h + g], x[:, h + g :]


def center_of(spec, bias):
    """What is subtracted from K [G, D]: the key heads' bias where rotation is slow. ``bias`` [(H + 2·G)·D], or None."""
    h, g, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    slow = np.tile(np.array(spec.rope.inv_freq, f32) < f32(2.0**-13), 2)
    return np.where(slow, (np.zeros((h + 2 * g) * d, f32) if bias is None else bias).reshape(-1, d)[h : h + g], f32(0))


def restated(spec, qkv, dtype, window, kv, bias=None):
    """The contract, row by row. → q [T, H·D], the attention's output [T, H·D], both of act precision."""
    q, k, v = rotated(spec, qkv)
    q, cache = act(q, dtype), Cached(k, v, dtype, kv, center_of(spec, bias))
    out = np.zeros((len(qkv), spec.num_heads, spec.head_dim), f32)
    scale = f32(1) / np.sqrt(f32(spec.head_dim))
    per = spec.num_heads // spec.num_kv_heads
    for h in range(spec.num_heads):
        scores = cache.scores(q[:, h], h // per, scale)
        for t in range(len(qkv)):
            low = max(0, t - window + 1) if window else 0
            top = mass = total = None
            for base in range(low // 256 * 256, t + 1, 256):
                at = np.arange(base, min(base + 256, -(-(t + 1) // 16) * 16))
                seen = (at >= low) & (at <= t)
                s = np.full(len(at), -np.inf, f32)
                s[seen] = scores[t, at[seen]]
                high = s.max()
                here, part = cache.weigh(np.where(seen, contract_exp(s - high), f32(0)), at, seen, h // per)
                if top is None:
                    top, mass, total = high, here, part
                    continue
                both = max(top, high)
                a, b = contract_exp(np.array([top - both, high - both], f32))
                total = total * a + part * b
                mass = mass * a + here * b
                top = both
            out[t, h] = total / mass
    return q.reshape(len(qkv), -1), act(out, dtype).reshape(len(qkv), -1)


def exact(spec, qkv, dtype, window, kv, bias=None):
    """The same from the cache's values in float64, no rounding on the way."""
    q, k, v = rotated(spec, qkv)
    cache = Cached(k, v, dtype, kv, center_of(spec, bias))
    q = act(q, dtype)
    q, k, v = (x.astype(float) for x in (spread(q) if cache.integer else q, cache.k, cache.v))
    k, v = (np.repeat(x, spec.num_heads // spec.num_kv_heads, 1) for x in (k, v))
    s = np.einsum("thd,uhd->htu", q, k) / np.sqrt(spec.head_dim)
    t, u = np.arange(len(qkv))[:, None], np.arange(len(qkv))
    s = np.where((u <= t) & (u > t - (window or 1 << 30)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("htu,uhd->thd", p / p.sum(-1, keepdims=True), v).reshape(len(qkv), -1)

