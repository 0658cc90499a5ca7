"""Why a benchmark misses a target: which bytes or instructions are left. The page says it below the table.

What was tried stands in docs/decisions.md.
"""

REASONS = {
    "bench_decode": (
        "At one row a step waits for the weights' bytes, of which published weights have a fraction, and "
        "for the launches around them. From some eight rows on it computes: every weight is multiplied with "
        "every row, in float32, by ours and by vLLM's oneDNN alike, and a 32-row step takes little more "
        "than its multiply-adds take on this processor. What is gained there are the passes around the "
        "products, not the products."
    ),
    "bench_decode --rivals vllm": "As above.",
    "bench_decode --model gemma3-270m": (
        "As above; of this model's weights two thirds are the output head, in 8 bits in its file."
    ),
    "extract": (
        "A single row pays for one launch of the kernel and for checks of its arguments, which do not "
        "depend on the vocabulary; the pass over its logits is a part of that. With 32 rows a call the pass "
        "is what is left: an exponential for each value, where a sum waits for memory, so that their ratio "
        "differs with the host."
    ),
    "bench_logprobs_cost --rivals vllm": (
        "Named ids were read one list at a time; the run above reads all at once."
    ),
    "bench_next_token": (
        "In vLLM nearly all of a round is vLLM's own forward pass, which both contestants run. The "
        "event loop's stalls are the asks of one iteration, and waits for the interpreter while another "
        "thread runs."
    ),
    "bench_real --model llama-1b": (
        "A first load reads every weight three times and lays it out anew. Panels of Q4_K and Q6_K hold "
        "scales and summands in float32. A step of one row waits for the weights' bytes, one of 32 rows "
        "and a prompt for their multiply-adds, in float32 (see `bench_decode`)."
    ),
    "bench_real --model llama-1b --rivals llama_cpp": (
        "bfloat16 weights are multiplied as they are read. Blocks of Q8_0, Q4_K and Q6_K are widened to "
        "float32 at each step: one row of them computes and does not wait for memory, the more so the fewer "
        "bits there are, while llama.cpp multiplies small integers, rows rounded to 8 bits included, which "
        "is faster and no longer exact. Panels of Q4_K and Q6_K hold scales and summands in float32, hence "
        "their size on disk and in memory. The peak of a first load counts the pages of the file and of its "
        "panels, both of which are mapped, beside the memory that nothing else could use."
    ),
    "bench_records": (
        "A row alone is kept as it comes and packed with others later: the pure-Python column store only "
        "appends to lists. From 64 rows a call on packing is one pass of numpy."
    ),
    "bench_score": (
        "A prompt's chunk computes: every weight is multiplied with every row, in float32, by ours and by "
        "vLLM's oneDNN alike, and both run near the multiply-adds of this processor. Attention is on the "
        "same products. What is left to gain are the passes between them."
    ),
    "bench_score --rivals vllm": "As above; measured alone on the machine, where the run above was not.",
    "bench_server": (
        "32 streams at once are steps of 32 rows, whose products bound both engines (see `bench_decode`); "
        "the server's own part is the share that it lacks to the rate in process."
    ),
    "bench_speculate": (
        "A story drafts next to nothing, so that what is left are the lookup of each token and the "
        "spread of the machine from round to round."
    ),
    "bench_start": (
        "Imports of torch, of transformers' tokenizers and of the compiled kernels; the weights "
        "themselves are mapped, and transformers' models are not imported where an earlier load has "
        "left its proof."
    ),
    "bench_surprisal": "What is left is the forward pass of short sentences, which all contestants run.",
}
