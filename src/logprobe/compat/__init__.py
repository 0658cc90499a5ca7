"""Names of other projects, for programs that are moved to this library unchanged.

- `vllm_logprobs`: the flat container of vLLM's log-probabilities, and its create and append functions.
- `logprobs_processor`: step containers, copies to the host and the streaming collector.
- `fastdeploy`: FastDeploy's `LLM`, `SamplingParams` and logits processors.
- `genlm`: genlm-backend's asynchronous next-token language models.

LightLLM is asked over HTTP and has no module; docs/coming-from.md lists its parameters. Only lazy names of
`logprobe`, `logprobe.records` and `logprobe.transport` load this package.
"""
