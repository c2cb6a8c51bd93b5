"""BackLite as an attention implementation of Hugging Face transformers.

::

    attentions = use_back_lite(model, negl_prob=0.05)   # as many as the model has layers
    attentions[3].negl_prob = 0.1                       # each may be changed at any time

It goes through the library's own interfaces for attention and masks; nothing is patched. Causal
attention over whole sequences, with or without a growing cache. What BackLite has no form of yet,
such as padded or packed batches, is refused before any attention is computed. These checks look at
the data, so that torch.compile breaks its graph there: fullgraph=True is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from back_lite import BackLite
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

NAME = "back_lite"
# Arguments of attention functions that change the result.
UNKNOWN = {
    "cu_seq_lens_q": "packed sequences are not supported yet",
    "cu_seq_lens_k": "packed sequences are not supported yet",
    "sliding_window": "sliding windows are not wired up in this example",
    "softcap": "soft-capped scores are not supported",
    "s_aux": "attention sinks are not supported",
    "position_bias": "position biases are not supported",
    "indices": "a model's own choice of keys is not supported",
    "block_indices": "a model's own choice of keys is not supported",
    "output_attentions": "attention probabilities are never stored",
}


def back_lite_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_: object,
) -> None:
    """No mask is needed where attention is causal; everything else is refused, once a forward.

    Shapes: attention_mask: bool [batch, keys].
    """
    if attention_mask is not None and not attention_mask.all():
        padding = int((~attention_mask).sum())
        raise NotImplementedError(
            f"attention_mask marks {padding} tokens as padding: padded batches are not supported "
            "yet; accepted are whole sequences of one length, with a mask of ones or none"
        )
    if local_size is not None:
        raise NotImplementedError(f"sliding_window = {local_size}: {UNKNOWN['sliding_window']}")
    if mask_function is not causal_mask_function:
        raise NotImplementedError(
            "the model asks for a mask other than causal, as position_ids that start again do: "
            "packed sequences and other masks are not supported yet; accepted is one sequence a row"
        )
    if not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        raise NotImplementedError(
            f"past_key_values: {kv_length} keys for {q_length} queries from position {q_offset}: "
            "accepted is a cache that ends with the last query, such as DynamicCache"
        )
    if attention_mask is not None and attention_mask.shape[-1] < kv_offset + kv_length:
        raise NotImplementedError(
            f"attention_mask covers {attention_mask.shape[-1]} of {kv_offset + kv_length} tokens: "
            "the others count as padding, which is not supported yet; accepted is a mask of ones "
            "for all of them, or none"
        )


def back_lite_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """query: [B, H, S, D]; key, value: [B, Hk, Sk, D]. Returns [B, S, H, D]."""
    if attention_mask is not None:
        raise NotImplementedError("attention_mask has 4 dimensions: accepted is causal alone")
    if dropout:
        raise NotImplementedError(f"attention_dropout = {dropout}: accepted is 0")
    # As the library's own functions ask: the argument, or else the module.
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError("is_causal = False: accepted is causal attention")
    attention: BackLite | None = getattr(module, "back_lite", None)
    if attention is None:
        raise ValueError(
            f"{type(module).__name__} has no BackLite module: accepted are attention layers that "
            "use_back_lite(model) has prepared"
        )
    for name, reason in UNKNOWN.items():
        if options.get(name) is not None and options[name] is not False:
            raise NotImplementedError(f"{name} is given: {reason}")
    # With use_cache the library does not look for packed sequences, and asks no mask for them.
    if (
        module.back_lite_is_first  # once a forward: it waits for the GPU
        and position_ids is not None
        and (position_ids.diff(dim=-1) != 1).any()
    ):
        raise NotImplementedError(
            "position_ids start again: packed sequences are not supported yet; accepted is one "
            "sequence a row"
        )
    turned = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attention(*turned, scale=scaling, causal=True), None


def use_back_lite(model: PreTrainedModel, negl_prob: float = 0.0) -> list[BackLite]:
    """Gives every attention layer of a model a BackLite module; returns them, first layer first."""
    attentions = []
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "num_key_value_groups") and hasattr(module, "layer_idx"):
                # Where the layer is, or compiled code would copy the thresholds at every call.
                module.back_lite = BackLite(negl_prob).to(next(module.parameters()).device)
                module.back_lite_is_first = not attentions  # of hybrid models, not the first layer
                attentions.append(module.back_lite)
    if not attentions:
        raise ValueError(f"model = {type(model).__name__}: no attention with num_key_value_groups")
    model.set_attn_implementation(NAME)
    return attentions


AttentionInterface.register(NAME, back_lite_attention)
AttentionMaskInterface.register(NAME, back_lite_mask)
