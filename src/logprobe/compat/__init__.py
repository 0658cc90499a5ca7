"""Compatible names of other projects, so that programs can switch to this library by changing an import.

- `vllm_logprobs`: vLLM's flat container of log-probabilities, and its create and append functions.
- `logprobs_processor`: step containers, copies to the host and the streaming collector.
- `fastdeploy`: FastDeploy's `LLM`, `SamplingParams` and logits processors.
- `genlm`: genlm-backend's asynchronous next-token language models.

LightLLM clients use HTTP and need no module; docs/coming-from.md lists the parameters. Only lazy names of
`logprobe`, `logprobe.records` and `logprobe.transport` import this package.
"""
