"""Models of `transformers` 4.57, the last with Flax, with random weights: two layers of each, at their published widths.

With a number of tokens, it is one sequence of so many (in an encoder and in its decoder)."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.registry import Built, Size, add, half, integers, like, normal, pick


def library() -> Any:
    """This imports the library, without PyTorch and TensorFlow."""
    os.environ.setdefault("USE_TORCH", "0")
    os.environ.setdefault("USE_TF", "0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    if not hasattr(transformers, "FlaxGPT2Model"):
        raise ModuleNotFoundError("transformers 4 with Flax", name="transformers 4.57 (with Flax models)")
    if not getattr(jnp.clip, "takes_old_names", False):
        jnp.clip = _clip_with_old_names(jnp.clip)
    return transformers


def _clip_with_old_names(clip: Any) -> Any:
    """`jnp.clip` with the names a_min and a_max, which JAX dropped and FlaxT5 uses."""

    @functools.wraps(clip)
    def wrapped(*args: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
        old = {k: v for k, v in (("min", a_min), ("max", a_max)) if v is not None}
        return clip(*args, **options, **old)

    wrapped.takes_old_names = True
    return wrapped


def _model(size: Size, kind: str, configuration: Any, inputs: dict[str, Any]) -> Built:
    model = getattr(library(), kind)(configuration, dtype=half(size), _do_init=False)
    structs = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), model.input_shape))

    def run(parameters: Any, inputs: Any) -> Any:
        output = model(**inputs, params=parameters, train=False)
        return next(output[k] for k in ("logits", "last_hidden_state") if k in output)

    return Built(run, (like(structs, half(size)), inputs))


def _tokens(size: Size, tokens: int, vocabulary: int, *, batch: int | None = None) -> dict[str, Any]:
    batch = batch or pick(size, 4, 1, 1)
    return {
        "input_ids": integers(batch, tokens, below=vocabulary),
        "attention_mask": integers(batch, tokens, below=2, ramp=True),
    }


def _gpt2(size: Size, tokens: int | None = None, layers: int = 2) -> Built:
    n, heads, most, vocabulary = pick(size, (768, 12, 1024, 50257), (256, 4, 256, 1000), (16, 2, 8, 50))
    batch, tokens = (1, tokens) if tokens else (None, most)
    configuration = library().GPT2Config(
        n_embd=n, n_head=heads, n_layer=layers, vocab_size=vocabulary, n_positions=tokens
    )
    return _model(size, "FlaxGPT2Model", configuration, _tokens(size, tokens, vocabulary, batch=batch))


def _bert(size: Size, tokens: int | None = None, layers: int = 2) -> Built:
    n, heads, most, vocabulary = pick(size, (768, 12, 512, 30522), (256, 4, 256, 1000), (16, 2, 8, 50))
    batch, tokens = (1, tokens) if tokens else (None, most)
    configuration = library().BertConfig(
        hidden_size=n,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=4 * n,
        vocab_size=vocabulary,
        max_position_embeddings=max(tokens, 512),
    )
    return _model(size, "FlaxBertModel", configuration, _tokens(size, tokens, vocabulary, batch=batch))


def _llama(size: Size, tokens: int | None = None, layers: int = 2) -> Built:
    n, heads, most, vocabulary = pick(size, (2048, 16, 1024, 32000), (256, 4, 256, 1000), (16, 2, 8, 50))
    batch, tokens = (1, tokens) if tokens else (None, most)
    configuration = library().LlamaConfig(
        hidden_size=n, num_attention_heads=heads, num_key_value_heads=heads // 2, num_hidden_layers=layers,
        intermediate_size=pick(size, 5632, 688, 32), vocab_size=vocabulary, max_position_embeddings=max(tokens, 64),
    )  # fmt: skip
    inputs = _tokens(size, tokens, vocabulary, batch=batch)
    inputs["position_ids"] = integers(*inputs["input_ids"].shape, below=tokens, ramp=True)
    return _model(size, "FlaxLlamaModel", configuration, inputs)


def _t5(size: Size, tokens: int | None = None, layers: int = 2) -> Built:
    n, heads, most, vocabulary = pick(size, (512, 8, 512, 32128), (256, 4, 256, 1000), (16, 2, 8, 50))
    batch, tokens = (1, tokens) if tokens else (None, most)
    configuration = library().T5Config(
        d_model=n,
        num_heads=heads,
        d_kv=n // heads,
        d_ff=4 * n,
        num_layers=layers,
        num_decoder_layers=layers,
        vocab_size=vocabulary,
    )
    inputs = _tokens(size, tokens, vocabulary, batch=batch)
    inputs["decoder_input_ids"] = integers(*inputs["input_ids"].shape, below=vocabulary)
    return _model(size, "FlaxT5Model", configuration, inputs)


def _whisper(size: Size, tokens: int | None = None, layers: int = 2) -> Built:
    n, heads, frames, words, mels = pick(size, (512, 8, 3000, 256, 80), (256, 4, 512, 64, 80), (16, 2, 16, 8, 8))
    batch, frames, words = (1, 2 * tokens, tokens) if tokens else (pick(size, 4, 1, 1), frames, words)
    configuration = library().WhisperConfig(
        d_model=n, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * n, decoder_ffn_dim=4 * n, num_mel_bins=mels, max_source_positions=frames // 2,
        max_target_positions=words, vocab_size=100, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    inputs = {"input_features": normal(batch, mels, frames), "decoder_input_ids": integers(batch, words, below=100)}
    return _model(size, "FlaxWhisperModel", configuration, inputs)


for _name, _build in (("gpt2", _gpt2), ("bert", _bert), ("llama", _llama), ("t5", _t5), ("whisper", _whisper)):
    add(f"transformers-{_name}", "transformers", _build)
