"""Llama and what shares its body: SmolLM2, Mistral (sliding window), Qwen2 (see qwen.py).

Sources: Touvron et al. 2023 (Llama); Jiang et al. 2023 (Mistral: sliding window, grouped-query attention).
"""

from collections.abc import Iterator
from typing import Any

from octavo.errors import UnsupportedError
from octavo.models.spec import Fields, ModelSpec
from octavo.ops.table import Handle, Ops
from octavo.weights.rules import Ignored, Part, WeightRule


def llama(ops: Ops, w: Any, s: ModelSpec) -> Handle:
    """Pre-norm decoder: grouped-query attention with rotary embedding, SwiGLU."""
    x = ops.embed(w.embed)
    for i, l in enumerate(w.layers):  # noqa: E741 (reads like the formula)
        q = ops.rope_store(ops.linear(ops.norm(x, l.n1, s.eps), l.qkv, bias=l.qkv_b), i, s.rope, l.qkv_b)
        a = ops.attention(q, i, s.windows[i])
        if i == s.num_layers - 1:  # nobody reads what the last layer makes of other rows
            a, x = ops.take_rows(a), ops.take_rows(x)
        x = ops.linear(a, l.o, bias=l.o_b, residual=x)
        h = ops.norm(x, l.n2, s.eps)
        x = ops.linear(ops.linear(h, l.gate_up, bias=l.gate_up_b, act="silu_mul"), l.down, bias=l.down_b, residual=x)
    return ops.head(ops.norm(x, w.norm, s.eps), w.head)


def rules(s: ModelSpec) -> Iterator[WeightRule]:
    """The weights of ``llama``."""
    d, q, kv = s.hidden, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    embed = Part("model.embed_tokens.weight", "token_embd.weight", (s.vocab, d))
    yield WeightRule("embed", "table", (embed,))
    for i in range(s.num_layers):

        def part(hf: str, gguf: str, *shape: int, rotary: int = 0, i: int = i) -> Part:
            return Part(f"model.layers.{i}.{hf}", f"blk.{i}.{gguf}", shape, rotary)

        def rule(name: str, kind: str, *parts: Part, i: int = i, **more: bool) -> WeightRule:
            return WeightRule(f"layers.{i}.{name}", kind, parts, **more)

        def bias(name: str, *parts: Part, there: bool, i: int = i) -> WeightRule:
            return WeightRule(f"layers.{i}.{name}", "vector", parts if there else ())

        yield rule("n1", "vector", part("input_layernorm.weight", "attn_norm.weight", d))
        yield rule("qkv", "linear", part("self_attn.q_proj.weight", "attn_q.weight", q, d, rotary=s.num_heads),
                   part("self_attn.k_proj.weight", "attn_k.weight", kv, d, rotary=s.num_kv_heads),
                   part("self_attn.v_proj.weight", "attn_v.weight", kv, d))
        yield bias("qkv_b", part("self_attn.q_proj.bias", "attn_q.bias", q, rotary=s.num_heads),
                   part("self_attn.k_proj.bias", "attn_k.bias", kv, rotary=s.num_kv_heads),
                   part("self_attn.v_proj.bias", "attn_v.bias", kv), there=s.qkv_bias)
        yield rule("o", "linear", part("self_attn.o_proj.weight", "attn_output.weight", d, q))
        yield bias("o_b", part("self_attn.o_proj.bias", "attn_output.bias", d), there=s.o_bias)
        yield rule("n2", "vector", part("post_attention_layernorm.weight", "ffn_norm.weight", d))
        yield rule("gate_up", "linear", part("mlp.gate_proj.weight", "ffn_gate.weight", s.ffn, d),
                   part("mlp.up_proj.weight", "ffn_up.weight", s.ffn, d), interleave=True)
        yield bias("gate_up_b", part("mlp.gate_proj.bias", "ffn_gate.bias", s.ffn),
                   part("mlp.up_proj.bias", "ffn_up.bias", s.ffn), there=s.mlp_bias)
        yield rule("down", "linear", part("mlp.down_proj.weight", "ffn_down.weight", d, s.ffn))
        yield bias("down_b", part("mlp.down_proj.bias", "ffn_down.bias", d), there=s.mlp_bias)
    yield WeightRule("norm", "vector", (Part("model.norm.weight", "output_norm.weight", (d,)),))
    if not s.tied:  # tied: the loader makes the head the embedding's own handle
        yield WeightRule("head", "table", (Part("lm_head.weight", "output.weight", (s.vocab, d)),))


def ignored(s: ModelSpec) -> Ignored:
    """Old exports hold rotary buffers; a tied head may be stored twice; GGUF's rope factors were read into the spec."""
    tied = ("lm_head.weight",) if s.tied else ()
    return Ignored(hf=("*.rotary_emb.inv_freq", *tied), gguf=("rope_freqs.weight",))


def llama_traits(c: Fields, layers: int) -> dict[str, Any]:
    """Full attention, optional biases."""
    attention, mlp = c.flag("attention_bias", False), c.flag("mlp_bias", False)
    return {"windows": (None,) * layers, "qkv_bias": attention, "o_bias": attention, "mlp_bias": mlp}


def mistral_traits(c: Fields, layers: int) -> dict[str, Any]:
    """One window for all layers: 4096 when the key is absent (as its configuration class has it), none when it is null."""
    kinds = c.get("layer_types", [])
    if not isinstance(kinds, list | tuple) or any(kind != kinds[0] for kind in kinds):
        raise UnsupportedError("config.json: Mistral with layer_types that differ is not served", "layer_types")
    off = "sliding_window" in c.values and c.values["sliding_window"] is None
    return {"windows": (None if off else c.whole("sliding_window", 4096, high=1 << 31),) * layers}
