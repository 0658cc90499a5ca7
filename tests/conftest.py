"""Shared fixtures with tiny random models; only tests marked `real_model` need a download."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import socket
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

# Before torch and tokenizers load: as many threads as the smallest test machine has cores, or one with
# pytest-xdist; idle threads sleep. Tests about threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before Triton loads: without an NVIDIA GPU its kernels run in its interpreter.
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110
    os.environ.setdefault("TRITON_INTERPRET", "1")

from logprobe.errors import LogprobeError, MissingPackageError  # after the environment is set

if find_spec("hypothesis") is not None:
    from hypothesis import settings as hypothesis_settings

    # Hypothesis' deadline of 200 ms only makes sense on an idle machine. All runs of the suite use the same
    # examples, except `make fuzz`.
    is_fuzz = "FUZZ_EXAMPLES" in os.environ
    hypothesis_settings.register_profile("steady", deadline=None, derandomize=not is_fuzz)
    hypothesis_settings.load_profile("steady")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe import LLM
    from logprobe.server import ServerSettings

TESTS = Path(__file__).parent
# Folder of tiny models that tests/core_models.py made for tests without torch.
MADE_MODELS = os.environ.get("TINY_MODELS")
CONTEXT_LEN = 128
SHARED: list[LLM] = []  # the models shared by all files of a process


# Excluded from `make quick`: these start processes, wait for clocks, interpret GPU kernels or load very many
# models.
SLOW = [
    "analysis/auditing", "analysis/baseline", "analysis/datasets", "analysis/distillation",
    "benchmarks", "cli", "clients", "evaluators", "examples", "families", "gpu",
    "integrations", "release", "simulation", "sources", "torture", "trainers", "web",
    "docs/test_api_page.py", "docs/test_audit_page.py", "docs/test_coming_from.py", "docs/test_pages.py",
    "engine/backends", "engine/forward/cuda", "engine/test_failures.py", "engine/test_healing.py",
    "engine/test_lora_kinds.py", "engine/test_overlap.py", "engine/test_replaced_weights.py",
    "engine/test_speculate.py", "engine/test_speculate_models.py",
    "kernels/draw/test_triton.py", "kernels/extraction/test_triton.py", "kernels/test_aarch64.py",
    "kernels/test_properties.py", "kernels/test_threads.py", "kernels/triton",
    "models/stored", "models/test_quiet.py", "next_token",
    "server/attacks", "server/test_behaviour.py", "server/test_channels.py", "server/test_clock.py",
    "server/test_logs.py", "server/test_metrics.py", "server/test_metrics_port.py", "server/test_models.py",
    "server/test_schemas.py", "server/test_shutdown.py", "server/test_start.py", "server/test_workers.py",
    "transport/test_collector_model.py",
]  # fmt: skip
REAL = {"real_llm", "smollm2_folder", "real_files", "real_gguf"}  # fixtures that download a model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as slow or `real_model`; skip those marked `gpu`, `vllm` or `ray` if it is missing."""
    slow = tuple(config.rootpath / "tests" / name for name in SLOW)
    for item in items:
        if not {item.path, *item.path.parents}.isdisjoint(slow):
            item.add_marker("slow")
        if not REAL.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("real_model")
    for mark, reason in MISSING.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and not HAS[mark]():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


# Packages of extras that `make test-core` does without.
OPTIONAL = ("torch", "transformers", "peft", "pyarrow", "pandas", "polars", "duckdb", "triton", "matplotlib")
ABSENT = [name for name in OPTIONAL if find_spec(name) is None]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Report test files as skipped that import a missing package of an extra."""
    report = yield
    call = getattr(report, "call", None)
    error = None if call is None or call.excinfo is None else call.excinfo.value.__cause__
    is_absent = isinstance(error, ModuleNotFoundError) and error.name in ABSENT
    if is_absent or (ABSENT and isinstance(error, MissingPackageError)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {error}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Report tests as skipped that import a missing package of an extra, or use what needs the extra."""
    report = yield
    if call.excinfo is not None and (reason := absent_reason(call.excinfo.value)) is not None:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
    return report


def absent_reason(error: BaseException) -> str | None:
    """Return why a test cannot run here; None if `error` is a failure.

    An import in the library is a failure, unless the library refuses with an error of its own, which names
    the extra.
    """
    is_refusal = isinstance(error, LogprobeError)
    while is_refusal and error.__cause__ is not None:
        error = error.__cause__
    if ABSENT and isinstance(error, MissingPackageError):
        return str(error)
    if not isinstance(error, ModuleNotFoundError) or error.name not in ABSENT:
        return None
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    importer = next(file for file in reversed(files) if not file.startswith("<frozen"))
    is_library = importer.startswith(str(TESTS.parent / "src"))
    return None if is_library and not is_refusal else f"{error.name} is not installed"


def has_gpu() -> bool:
    if "torch" in ABSENT:
        return False
    import torch

    return torch.cuda.is_available()


HAS = {
    "gpu": has_gpu,
    "vllm": lambda: find_spec("vllm") is not None,
    "ray": lambda: find_spec("ray") is not None,
}
MISSING = {
    "gpu": "runs on an NVIDIA GPU; there is none here",
    "vllm": "vLLM has an environment of its own: `make test-vllm` builds it and runs these",
    "ray": "needs Ray: `make test-ray` installs it and runs these",
}


@pytest.fixture(scope="session", autouse=True)
def _models_are_proven_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share a model cache between the processes of a run, so that each model is verified and packed once.

    The list of known models is that of the user's cache.
    """
    from logprobe.models.cache import home

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "home"
    folder.mkdir(exist_ok=True)
    models = home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (folder / "models").symlink_to(models.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGPROBE_HOME", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _engines_leave_the_collector_alone() -> Iterator[None]:
    """Disable `gc.freeze` in engines: it is called once per test file instead."""
    from logprobe.engine.forward import process_memory

    process_memory.gc = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)  # type: ignore[assignment]
    yield
    process_memory.gc = gc
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _collections_walk_past_what_was_there() -> None:
    """Freeze existing objects, so that garbage collections only traverse those of this file.

    Each engine collects when it opens and closes: a third of a second with all libraries loaded, and about
    a thousand times in a run of the suite.
    """
    from logprobe import LLM  # noqa: F401 - and with it what most tests load

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _draws_do_not_depend_on_the_files_before() -> None:
    """Restart the request numbers of shared engines: draws without a seed depend on them."""
    for llm in SHARED:
        llm.engine.core.engine._counter = itertools.count()


def share(llm: LLM) -> LLM:
    """Register a model that all files of a process share."""
    SHARED.append(llm)
    return llm


MERGES = (
    "t h,th e,Ġ t,Ġ th,Ġ the,a n,an d,Ġ and,i n,in g,Ġ a,o n,e r,r e,Ġ o,Ġo f,Ġ w,Ġ s,s t,e n,"
    "Ġ Ġ,ĠĠ Ġ,a b,c a,ca t,Ġ cat,d o,do g,Ã ©,ð Ł"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 2 layers, grouped-query attention and an untied head; its tokenizer adds BOS."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def copy_made(name: str, folder: Path) -> bool:
    """Copy a model that tests/core_models.py made to `folder`; False if models are made anew.

    Without torch, tests of models that were not made are skipped.
    """
    if MADE_MODELS is None:
        return False
    if not (Path(MADE_MODELS) / name).exists():
        pytest.skip(f"tests/core_models.py does not make {name}")
    shutil.copytree(Path(MADE_MODELS) / name, folder, dirs_exist_ok=True)
    return True


def save_tiny_llama(folder: Path, **special: Any) -> Path:
    """Write the model of `tiny_model_folder`, with the settings in `special` changed."""
    if copy_made("-".join(["llama", *(f"{name}={value}" for name, value in special.items())]), folder):
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = save_tokenizer(folder, with_bos=True)
    settings = {"num_hidden_layers": 2, "tie_word_embeddings": False, **shape(), **special}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, **settings))
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)  # logits spread over about ten nats
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_window_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 with 3 layers: sliding windows, soft-capped scores and logits, a tied head; no BOS."""
    return save_tiny_gemma2(tmp_path_factory.mktemp("tiny-gemma2"))


def save_tiny_gemma2(folder: Path) -> Path:
    """Write the model of `tiny_window_folder`."""
    if copy_made("gemma2", folder):
        return folder
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=save_tokenizer(folder, with_bos=False),
        num_hidden_layers=3,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=12,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=8.0,
        **shape(),
    )
    torch.manual_seed(1)
    model = Gemma2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.4 if "embed" in name else 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixture_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 2 layers with 6 experts, 2 of them per token, and the tokenizer of the tiny Llama."""
    return save_tiny_mixture(tmp_path_factory.mktemp("tiny-mixture"), tiny_model_folder)


def save_tiny_mixture(folder: Path, tokenizer_folder: Path) -> Path:
    """Write the model of `mixture_folder`."""
    if copy_made("mixture", folder):
        return folder
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=AutoConfig.from_pretrained(tokenizer_folder).vocab_size,
        num_hidden_layers=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **shape(),
    )
    torch.manual_seed(4)
    model = Qwen3MoeForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer*", "chat_template*"):
        for file in tokenizer_folder.glob(name):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llm(tiny_model_folder: Path) -> Iterator[LLM]:
    """The tiny Llama in an `LLM`."""
    from logprobe import LLM

    with LLM(
        str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, max_num_batched_tokens=64, max_num_seqs=8
    ) as llm:
        yield share(llm)


@pytest.fixture(scope="session")
def long_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny Llama with a longer context, for conversations with tools."""
    from logprobe import LLM

    folder = save_tiny_llama(tmp_path_factory.mktemp("long-llama"), max_position_embeddings=2048)
    with LLM(str(folder), kv_cache_memory_bytes=1 << 22, max_num_batched_tokens=256, max_num_seqs=8) as llm:
        yield share(llm)


@pytest.fixture(scope="session")
def spaced_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny Llama whose tokenizer adds a space before a text, as Llama 2's and Mistral's do."""
    from logprobe import LLM
    from spaced_models import save_spaced_llama

    folder = save_spaced_llama(tmp_path_factory.mktemp("spaced-llama"))
    with LLM(str(folder), kv_cache_memory_bytes=1 << 22, max_num_batched_tokens=256, max_num_seqs=8) as llm:
        yield share(llm)


@pytest.fixture(scope="session")
def adapter_folders(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two LoRA adapters: attention and MLP layers; queries only, with another rank and scale."""
    return save_adapters(tiny_model_folder, tmp_path_factory)


def save_adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the adapters of `adapter_folders` for a model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    everything = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    configs = {
        "wide": LoraConfig(r=4, lora_alpha=8, target_modules=everything),
        "narrow": LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], use_rslora=True),
    }
    folders = {}
    for seed, (name, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.2)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def real_llm() -> Iterator[LLM]:
    """SmolLM2-135M-Instruct, Q4_1, in float32; tests are skipped with the reason if it cannot be loaded."""
    from logprobe import LLM
    from logprobe.errors import ModelError

    try:
        llm = LLM("smollm2", kv_cache_memory_bytes=1 << 29)
    except ModelError as error:
        pytest.skip(f"smollm2 cannot be loaded: {error}")
    with llm:
        yield share(llm)


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as float32 safetensors for other programs; written once per run."""
    from filelock import FileLock

    from logprobe.errors import ModelError
    from logprobe.models import resolve
    from logprobe.models.export import export_model

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "smollm2"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            try:
                export_model(resolve("smollm2"), folder, dtype="float32")
            except ModelError as error:
                pytest.skip(f"smollm2 cannot be had: {error}")
    return folder


@contextmanager
def serving(
    model: Any,
    settings: ServerSettings,
    processors: tuple[Any, ...] = (),
    further: dict[str, Any] | None = None,
    port: int = 0,
) -> Iterator[tuple[str, Any]]:
    """Serve an engine and its text edge from a thread during the block; yield address and application.

    `port` 0: any free port.
    """
    from logprobe.engine.backends.start import LoadedModel
    from logprobe.server.app import create_app, uvicorn_config
    from logprobe.server.http.shutdown import DrainingServer

    app = create_app(
        LoadedModel(model.engine, model.text, processors=getattr(model, "processors", None)),
        settings,
        processors,
        further,
    )
    listener = socket.create_server(("127.0.0.1", port))
    # Otherwise the kernel would buffer megabytes for a client that reads nothing.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    server = DrainingServer(uvicorn_config(app, settings), app.state.service.lifetime)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended at its start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        app.state.models.close()


@pytest.fixture(scope="session")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """The tiny Llama with the head size that vLLM's CPU attention requires, and adapters for it."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("wide-heads"), head_dim=32)
    return folder, save_adapters(folder, tmp_path_factory)


@pytest.fixture(scope="session")
def new_serving() -> Callable[..., Any]:
    """Return `serving`, for tests in any folder."""
    return serving


def shape() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LEN,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }


def save_tokenizer(folder: Path, *, with_bos: bool) -> int:
    """Write a byte-level BPE tokenizer; return its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(merge.strip().split(" ")) for merge in MERGES.split(",")]
    pieces = ["<|bos|>", "<|eos|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
    specials: dict[str, Any] = {"eos_token": "<|eos|>"} | ({"bos_token": "<|bos|>"} if with_bos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return len(pieces)
