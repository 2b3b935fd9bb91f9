"""vLLM's server of OpenAI's API on the loopback, with a tiny model: a fork of the template that has imported vLLM.

``python -m vllm...`` imports everything twice, in half a minute of a processor; here the engine is a fork too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mmrl.system.worker_process import python
from tests.warm_workers import ROOT, Template

NAME = "tiny-judge"
_MODEL, _PORT = "MMRL_TEST_CHAT_MODEL", "MMRL_TEST_CHAT_PORT"
_START_S = 300.0


@contextmanager
def chat_server(template: Template, model: Path) -> Iterator[str]:
    """The address of the API, until the end of the block.

    Args:
        template: Has imported vLLM.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    variables = {_MODEL: str(model), _PORT: str(port), "VLLM_CPU_KVCACHE_SPACE": "1"}
    path = [ROOT, *python(__name__)[4:]]
    request = {"module": __name__, "path": path, "environment": {**os.environ, **variables}, "folder": os.getcwd()}
    pid = template.start(request, [0, 1, 2])
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while not _answers(f"{address}/health"):
            assert not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "vLLM's server has ended"
            assert time.monotonic() < deadline, "vLLM's server does not start"
            time.sleep(0.1)
        yield f"{address}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1):
            return True
    except OSError:
        return False


# In the server


def serve() -> None:
    """Serve until it is killed."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["--model", os.environ[_MODEL], "--served-model-name", NAME, "--host", "127.0.0.1"]
    words += ["--port", os.environ[_PORT], "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    words += ["--max-num-seqs", "16", "--distributed-executor-backend", "uni", "--limit-mm-per-prompt", '{"image": 2}']
    words += ["--uvicorn-log-level", "error"]
    # A random model writes blanks without an end where JSON allows them.
    words += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    asyncio.run(_serve(make_arg_parser(FlexibleArgumentParser()).parse_args(words)))


async def _serve(arguments: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.async_llm import AsyncLLM

    address, listening = entry.setup_server(arguments, reuse_port=False)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # which vLLM has set to spawn on a CPU
    engine = AsyncLLM.from_vllm_config(config)
    await (await entry.build_and_serve(engine, address, listening, arguments))
