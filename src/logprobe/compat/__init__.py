"""Names and signatures of other projects, so that programs can switch by changing an import.

- `vllm_logprobs`: vLLM's flat container for log-probabilities, and its functions that create and extend one.
- `logprobs_processor`: containers for the results of a step, copies to the host, and the streaming collector.
- `fastdeploy`: FastDeploy's `LLM`, `SamplingParams` and logits processors.
- `genlm`: genlm-backend's asynchronous next-token language models.

LightLLM clients use HTTP and need no module; docs/coming-from.md lists the parameters. No other
package of logprobe imports this one.
"""
