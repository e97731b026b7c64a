"""The real SmolLM2, from its GGUF file, against transformers given the same dequantized weights."""


import numpy as np
import pytest
from tests.harness import PROVIDERS, Bench

from octavo.models import registry
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.loader import to_halves

torch = pytest.importorskip("torch")
PROMPT = [  # "The capital of France is Paris, and the capital of Germany is Berlin. Once upon a time …"
    504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4521, 314, 11452, 30, 4027, 1980, 253, 655, 665, 436, 253, 1838, 8180, 617, 4161,
    281, 253, 6560, 2141, 260, 3150, 30, 24092, 1041, 3514, 578, 28, 1041, 17494, 253, 2382, 13948, 40362, 28, 588, 2573, 281, 260, 6560, 1217,
    874, 8728, 3950, 44453, 29057, 30, 1963, 5738, 28, 1041, 3413, 874, 3379, 585, 1041, 856, 685, 288, 3048, 874, 20790, 28, 347, 357, 761, 719,
    1243, 88, 552, 1675, 502, 761, 2269, 971, 550, 30,
]
CHUNKS = [5, 1, 60, 21]
PARIS, BERLIN = 7042, 11452


def oracle(path: str) -> "torch.nn.Module":
    """Built from the file's metadata and tensors by hand, not by the code under test (but for the order of rotary rows)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with open_checkpoint(path) as c:
        m = c.metadata
        config = LlamaConfig(
            vocab_size=49152, hidden_size=m["llama.embedding_length"], intermediate_size=m["llama.feed_forward_length"],
            num_hidden_layers=m["llama.block_count"], num_attention_heads=9, num_key_value_heads=3,
            rms_norm_eps=m["llama.attention.layer_norm_rms_epsilon"], max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": m["llama.rope.freq_base"]}, tie_word_embeddings=True,
        )
        names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
                 "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
                 "ffn_norm": "post_attention_layernorm"}
        state = {}
        for name in c.names():
            tensor = c.read(name)
            match name.split("."):
                case ["blk", i, part, "weight"]:
                    tensor = to_halves(tensor, {"attn_q": 9, "attn_k": 3}[part]) if part in ("attn_q", "attn_k") else tensor
                    state[f"model.layers.{i}.{names[part]}.weight"] = torch.from_numpy(tensor.copy())
                case _:
                    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
                    state[outer[name]] = torch.from_numpy(tensor.copy())
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on the meta device
    return model.eval()


@pytest.fixture(scope="module")
def reference(smollm2: str) -> "torch.nn.Module":
    return oracle(smollm2)


def logprobs_of(model: "torch.nn.Module", tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1).numpy()


@pytest.fixture(scope="module")
def want(reference: "torch.nn.Module") -> np.ndarray:
    return logprobs_of(reference, PROMPT)


@pytest.mark.model
@pytest.mark.parametrize("provider", PROVIDERS)
def test_float32_agrees(smollm2: str, want: np.ndarray, provider: str) -> None:
    got = run(smollm2, provider, "float32")
    np.testing.assert_allclose(got, want, atol=1e-3)
    assert got[4].argmax() == PARIS and got[12].argmax() == BERLIN  # it is a language model, and not both are wrong alike


@pytest.mark.model
@pytest.mark.parametrize("provider", PROVIDERS)
def test_bfloat16_is_near(smollm2: str, want: np.ndarray, provider: str) -> None:
    got = run(smollm2, provider, "bfloat16")
    kl = (np.exp(want, dtype=np.float64) * (want.astype(np.float64) - got)).sum(-1).mean()
    assert 1e-7 < kl < 4e-4, kl


def run(path: str, provider: str, dtype: str) -> np.ndarray:
    made = PROVIDERS[provider](dtype)
    with open_checkpoint(path) as checkpoint:
        model = registry.load(checkpoint, made, dtype)
    bench = Bench(made, model, dtype=dtype, max_tokens=64, num_blocks=8, alternatives=model.spec.vocab)
    return bench.logprobs(0, PROMPT, CHUNKS)


@pytest.mark.model
def test_its_shape(smollm2: str) -> None:
    with open_checkpoint(smollm2) as checkpoint:
        s = registry.read_spec(checkpoint)
    assert (s.arch, s.num_layers, s.hidden, s.num_heads, s.num_kv_heads, s.head_dim, s.vocab) == ("llama", 30, 576, 9, 3, 64, 49152)
    assert s.tied and s.eos_ids == (2, 0) and s.bos_id == 1 and s.max_position == 8192 and s.num_params == 134_515_008


TEXTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The three primary colours are", "In 1969,",
    "Dear Sir or Madam,", "The mitochondria is", "1, 1, 2, 3, 5, 8,", "To make an omelette, first", "El gato", "SELECT name FROM",
    "The opposite of hot is", "Q: What is 12 times 12?\nA:", "Roses are red,", "It was the best of times,", "import numpy as np\n",
    "The speed of light is", "Shakespeare wrote", "🙂 means",
]


@pytest.mark.model
def test_greedy_tokens_of_twenty_prompts(smollm2: str, reference: "torch.nn.Module") -> None:
    """Every token is the oracle's own choice after the same tokens (by induction, its greedy continuation); near-ties may go either way."""
    from octavo import LLM, SamplingParams

    with LLM(smollm2, dtype="float32", max_model_len=128, max_num_seqs=20) as llm:
        done = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=20), use_tqdm=False)
    checked = 0
    for out in done:
        sample = out.outputs[0]
        assert len(sample.token_ids) == 64
        table = logprobs_of(reference, [*out.prompt_token_ids, *sample.token_ids])[len(out.prompt_token_ids) - 1 : -1]
        for row, token, ours in zip(table, sample.token_ids, sample.logprobs, strict=True):
            best, second = np.partition(row, -2)[-1:-3:-1]
            assert row[token] == best or (best - second < 1e-3 and best - row[token] < 1e-3)
            for other, lp in ours.items():
                assert abs(lp.logprob - row[other]) < 1e-3
            checked += best - second >= 1e-3
    assert checked > 1200  # of 1,280: near-ties are few
