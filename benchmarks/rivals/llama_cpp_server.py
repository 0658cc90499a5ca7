"""llama.cpp's own HTTP server, which xllamacpp holds, until it is ended: `llama_cpp_server.py FILE PORT`."""

import signal
import sys

import xllamacpp

THREADS = 2
SLOTS = 4
CONTEXT_LEN = 8192  # of the requests of all slots together


def main() -> None:
    """Serve a file; but for its address, its size and its threads as the server is without options."""
    path, port = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = {"m"}
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_parallel = SLOTS
    params.n_ctx = CONTEXT_LEN
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
