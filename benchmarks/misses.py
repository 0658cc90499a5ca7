"""Reasons for missed targets, which `python benchmarks/report.py --all` prints."""

REASONS = {
    "bench_decode": (
        "At one row a step waits for the bytes of the weights, of which checkpoint precision has a "
        "fraction, and for the launches of kernels. From about eight rows on it computes: every weight is "
        "multiplied with every row in float32, by logprobe and by vLLM's oneDNN alike, and a step of 32 "
        "rows takes little more than its multiply-adds."
    ),
    "bench_decode --rivals vllm": "See `bench_decode`.",
    "bench_decode --model gemma3-270m": (
        "See `bench_decode`; two thirds of this model's weights are the output head, in 8 bits in its file."
    ),
    "extract": (
        "A single row pays for one kernel launch and for the checks of its arguments, which do not depend "
        "on the vocabulary. With 32 rows per call the pass over the logits remains: an exponential for "
        "each value, where a sum waits for memory, so their ratio depends on the machine."
    ),
    "bench_logprobs_cost --rivals vllm": (
        "Named ids were read one list at a time; in the later run of `bench_logprobs_cost` all are read at "
        "once."
    ),
    "bench_next_token": (
        "In vLLM nearly all of a round is vLLM's own forward pass, which both contestants run. The event "
        "loop's stalls are the requests of one iteration, and waits for the GIL while another thread runs."
    ),
    "bench_real --model llama-1b": (
        "A first load reads every weight three times and repacks it. Panels of Q4_K and Q6_K hold scales "
        "and summands in float32. A step of one row waits for the bytes of the weights; steps of 32 rows "
        "and prompts for their multiply-adds in float32 (see `bench_decode`)."
    ),
    "bench_real --model llama-1b --rivals llama_cpp": (
        "bfloat16 weights are multiplied as they are read. Blocks of Q8_0, Q4_K and Q6_K are widened to "
        "float32 at each step: with one row that computes and does not wait for memory, the more so the "
        "fewer bits there are, while llama.cpp multiplies small integers, with rows rounded to 8 bits, "
        "which is faster but not exact. Panels of Q4_K and Q6_K hold scales and summands in float32, hence "
        "their size on disk and in memory. The peak of a first load includes the mapped pages of the file "
        "and of its panels."
    ),
    "bench_records": (
        "A single row is kept as it comes and packed with others later, while the pure-Python column store "
        "only appends to lists. From 64 rows per call, packing is one pass of NumPy."
    ),
    "bench_score": (
        "A prompt chunk computes: every weight is multiplied with every row in float32, by logprobe and by "
        "vLLM's oneDNN alike, and both run near the peak of multiply-adds of this processor."
    ),
    "bench_score --rivals vllm": "See `bench_score`; this run had the machine to itself.",
    "bench_server": (
        "32 concurrent streams are steps of 32 rows, whose products bound both engines (see "
        "`bench_decode`); the server's own part is the difference from the rate in process."
    ),
    "bench_speculate": (
        "A story has almost no drafts; the lookup for each token and the spread between rounds remain."
    ),
    "bench_surprisal": "The forward pass of short sentences remains, which all contestants run.",
}
