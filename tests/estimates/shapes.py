"""Facts of well-known models and machines, written down from their public configurations."""

from tunekit.estimates.facts import Device, Hardware, ModelFacts

GIB = 2**30


def llama_facts(
    *, path, hidden, intermediate, layers, heads, kv_heads, vocab, tied=False, positions=131072
) -> ModelFacts:
    """A Llama-architecture model; the tensors are listed one by one, as its files would."""
    head_dim = hidden // heads
    kv = kv_heads * head_dim
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        tensors["lm_head.weight"] = (vocab, hidden)
    for n in range(layers):
        layer = f"model.layers.{n}."
        tensors |= {
            layer + "self_attn.q_proj.weight": (hidden, hidden),
            layer + "self_attn.k_proj.weight": (kv, hidden),
            layer + "self_attn.v_proj.weight": (kv, hidden),
            layer + "self_attn.o_proj.weight": (hidden, hidden),
            layer + "mlp.gate_proj.weight": (intermediate, hidden),
            layer + "mlp.up_proj.weight": (intermediate, hidden),
            layer + "mlp.down_proj.weight": (hidden, intermediate),
            layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
    return ModelFacts(
        path=path,
        architecture="LlamaForCausalLM",
        model_type="llama",
        tensors=tensors,
        dtype="bfloat16",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=positions,
        has_chat_template=True,
    )


LLAMA_8B = llama_facts(
    path="llama-3.1-8b", hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256
)
LLAMA_1B = llama_facts(
    path="llama-3.2-1b", hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=128256, tied=True
)
LLAMA_405B = llama_facts(
    path="llama-3.1-405b", hidden=16384, intermediate=53248, layers=126, heads=128, kv_heads=8, vocab=128256
)

LAPTOP = Hardware(
    cpu=Device(
        kind="cpu",
        name="CPU (test)",
        memory_total_bytes=16 * GIB,
        memory_free_bytes=12 * GIB,
        native_bfloat16=False,
    ),
    num_cores=8,
)


def with_gpu(name, gib, capability) -> Hardware:
    """The laptop with one accelerator, all its memory free."""
    device = Device(
        kind="cuda",
        name=name,
        memory_total_bytes=gib * GIB,
        memory_free_bytes=gib * GIB,
        native_bfloat16=capability >= (8, 0),
        compute_capability=capability,
    )
    return LAPTOP.model_copy(update={"accelerators": (device,)})


RTX_4090 = with_gpu("RTX 4090", 24, (8, 9))
T4 = with_gpu("T4", 16, (7, 5))
H100 = with_gpu("H100", 80, (9, 0))
