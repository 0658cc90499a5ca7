"""The source of decoders, output heads and rotary embeddings that `usual` follows, word for word."""

from __future__ import annotations

from typing import Final

_DECODER: Final = """
def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
            inputs_embeds=None, use_cache=None, **kwargs):
    if (input_ids is None) ^ (inputs_embeds is not None):
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    if inputs_embeds is None:
        inputs_embeds = self.embed_tokens(input_ids)
    if use_cache and past_key_values is None:
        past_key_values = DynamicCache(config=self.config)
    if position_ids is None:
        past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
        position_ids = position_ids.unsqueeze(0)
{masks}
    hidden_states = inputs_embeds
    position_embeddings = self.rotary_emb({rotary})
    for {layers}:
        hidden_states = decoder_layer(hidden_states, attention_mask={mask}, {options}, **kwargs)
    hidden_states = self.norm(hidden_states)
    return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values={cache})
"""
_MASK_ARGUMENTS: Final = """config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask,
        past_key_values=past_key_values, position_ids=position_ids,"""
_ONE_MASK: Final = f"    causal_mask = {{}}(\n        {_MASK_ARGUMENTS}\n    )"
_CHOSEN_MASK: Final = """
    mask_function = (
        create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask
    )
"""
_MASKS_BY_KIND: Final = """
    if not isinstance(causal_mask_mapping := attention_mask, dict):
        mask_kwargs = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "position_ids": position_ids,
        }
        causal_mask_mapping = {
            "full_attention": create_causal_mask(**mask_kwargs),
        }
        if self.has_sliding_layers:
            causal_mask_mapping["sliding_attention"] = create_sliding_window_causal_mask(**mask_kwargs)
"""
_ALL_LAYERS: Final = "decoder_layer in self.layers[: self.config.num_hidden_layers]"
_REST: Final = "past_key_values=past_key_values, use_cache=use_cache"
_ROTATED: Final = "position_embeddings=position_embeddings"
_PLACED: Final = "position_ids=position_ids"

DECODER: Final = (
    _DECODER.format(  # Llama
        masks=_ONE_MASK.format("create_causal_mask"),
        rotary="hidden_states, position_ids=position_ids",
        layers=_ALL_LAYERS,
        mask="causal_mask",
        options=f"{_ROTATED}, {_PLACED}, {_REST}",
        cache="past_key_values",
    ),
    _DECODER.format(  # Mistral
        masks=_CHOSEN_MASK + _ONE_MASK.format("mask_function"),
        rotary="hidden_states, position_ids=position_ids",
        layers=_ALL_LAYERS,
        mask="causal_mask",
        options=f"{_PLACED}, {_REST}, {_ROTATED}",
        cache="past_key_values if use_cache else None",
    ),
    _DECODER.format(  # Qwen2, Qwen3, SmolLM3
        masks=_MASKS_BY_KIND,
        rotary="hidden_states, position_ids",
        layers="i, decoder_layer in enumerate(self.layers[: self.config.num_hidden_layers])",
        mask="causal_mask_mapping[self.config.layer_types[i]]",
        options=f"{_ROTATED}, {_PLACED}, {_REST}",
        cache="past_key_values if use_cache else None",
    ),
)

HEAD: Final = (
    """
def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
            inputs_embeds=None, labels=None, use_cache=None, logits_to_keep=0, **kwargs):
    outputs = self.model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs)
    hidden_states = outputs.last_hidden_state
    hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)
    logits = self.lm_head(hidden_states)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(
        loss=loss, logits=logits, past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states, attentions=outputs.attentions)
""",
)

ROTARY: Final = (
    """
def forward(self, x, position_ids):
    freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos = emb.cos() * self.attention_scaling
    sin = emb.sin() * self.attention_scaling
    return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)
""",
)
# A decorator of the rotary embedding changes its frequencies for the kinds whose name holds one of these.
CHANGING_ROTARY: Final = ("dynamic", "longrope")
