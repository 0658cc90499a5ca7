"""The outcome of the default variant of every family in transformers' mapping of causal language models."""

from __future__ import annotations


def _kinds(text: str) -> list[str]:
    return text.split()


# Model types that the native decoder runs.
NATIVE = _kinds("""
arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3 gemma3_text glm got_ocr2 gpt-sw3
gpt2 gpt_neox granite helium internlm3 iquestcoder jais2 llama ministral ministral3 mistral
mixtral moss_transcribe_diarize olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 stablelm starcoder2
""")

# Model types that the transformers decoder runs, on the checkpoint's weights.
TRANSFORMERS = _kinds("""
afmoe apertus aria_text axk1 beam biogpt bitnet cohere2_moe ctrl deepseek_v2 deepseek_v3 dots1
ernie4_5_moe exaone_moe flex_olmo flint fuyu gemma3n_text gemma4 gemma4_text gemma4_unified_text
glm4 glm4_moe glm4_moe_lite gpt_bigcode gpt_oss granite_swa granitemoe granitemoe_swa
granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jetmoe kolibri1 laguna lfm2
longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text mllama
modernbert-decoder moshi nanochat nemotron opt persimmon phi4_multimodal phimoe solar_open
vaultgemma youtu
""")

# Reason for refusal → model types.
REFUSED = {
    "none of its layers uses transformers' attention interface": _kinds("""
        big_bird codegen falcon git gpt_neo gpt_neox_japanese gptj megatron-bert mvp openai-gpt
        prophetnet rembert roformer rwkv trocr xglm xlm xlnet
    """),
    "its tokens attend to later ones": _kinds("""
        bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm
        roc_bert xlm-roberta xlm-roberta-xl
    """),
    "its layer types are not supported: linear_attention": _kinds("""
        bamba granitemoehybrid jamba kimi_linear minimax olmo_hybrid qwen3_5_moe_text
        qwen3_5_text qwen3_next qwen4_exp_text
    """),
    "it has no max_position_embeddings (it may have a recurrent state, or ALiBi)": _kinds("""
        bloom cpmant falcon_mamba mamba mamba2 mpt recurrent_gemma whisper xlstm
    """),
    "its decoder takes no position_ids, so a step cannot mix texts": _kinds("""
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart
    """),
    "its layer types are not supported: indexed_attention": _kinds("""
        axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4
    """),
    "its layer 0 calls attention more than once in a forward pass": _kinds("""
        diffllama hrm_text
    """),
    "its layer types are not supported: hybrid": _kinds("""
        falcon_h1 zaya
    """),
    "its layer types are not supported: hybrid_sliding": _kinds("""
        inkling2_text inkling_text
    """),
    "its layer types are not supported: conv": _kinds("""
        lfm2_moe lfm3
    """),
    "its layer types are not supported: heavily_compressed_attention": _kinds("""
        deepseek_v4
    """),
    "its attention masks are additive (as in ALiBi), not boolean": _kinds("""
        doge
    """),
    "its masks depend on the tokens, not only on their positions": _kinds("""
        gemma4_unified
    """),
    "its layer types are not supported: chunked_attention": _kinds("""
        llama4_text
    """),
    "its layer types are not supported: linear_attention, mlp, moe": _kinds("""
        nemotron_h
    """),
    "the engine's logits differ from those of transformers": _kinds("""
        xmod
    """),
}

# No tiny model of these could be built; those with the same source are listed above under another name.
UNBUILT = _kinds("""
bailing_hybrid blt cohere_compass_text dbrx dots3_note emu3 gemma3n gemma4_assistant
gemma4_unified_assistant llama4 musicgen musicgen_melody qwen3_5 qwen3_5_moe qwen4_exp reformer
zamba zamba2
""")
