"""``python -m baton.entrypoints.launch_server --model-path …``: runs a server from start to end.

    bind the port → start the worker → check the rest → serve HTTP (503 until the model is loaded) → warm up → serve
    until: a signal (drain, exit 0) │ a child ends, the worker hangs or is not ready in time (fail, exit 1)

However it ends, by the time `main` returns the children are gone and their directory is removed.

Little else is imported here: the worker imports torch while this process imports `running_server`.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import sys
from collections.abc import Sequence

import setproctitle
import uvloop

from ..runtime.checkpoint.model_files import ModelLoadError, resolve_model_folder
from ..runtime.launcher.child_process import configure_logging, dump_stacks_on_signal
from ..runtime.launcher.server_processes import WORKER_MODULE, ServerProcesses
from .program import ServerFailure, allow_open_files
from .server_args import parse_command_line, with_seed
from .server_config import ServerArgs, ServerConfig, UsageError

logger = logging.getLogger(__name__)

_OTHER_FILES = 1024
"""Open files beside connections, with those of connections that are refused."""


def main(argv: Sequence[str] | None = None, *, worker_command: Sequence[str] = WORKER_MODULE) -> int:
    """Run a server; returns the exit status: 0 after a signal, 1 after a failure, 2 for bad flags."""
    try:
        args = parse_command_line(list(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    # Prompts are tokenised one at a time here, and the model needs the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logging("server", args.server.log_level)
    if args.server.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are about what strangers send
    for note in args.notes:
        logger.info("flag of another server: %s", note)
    setproctitle.setproctitle("baton::http")
    dump_stacks_on_signal()
    _allow_open_files(args.server.max_connections)
    try:
        with _listen(args.server.host, args.server.port) as listener:
            uvloop.run(_run(with_seed(args), listener, worker_command))
    except (ServerFailure, UsageError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


async def _run(args: ServerArgs, listener: socket.socket, worker_command: Sequence[str]) -> None:
    """Run a server from start to end. Raises ServerFailure, and UsageError for keys that cannot be read."""
    _check_certificate(args.server)
    try:
        tokenizer_folder = str(resolve_model_folder(args.tokenizer_path))
    except ModelLoadError as error:
        raise ServerFailure(str(error)) from None
    processes = ServerProcesses(args.worker_config, tokenizer_folder, worker_command=worker_command)
    try:
        await processes.spawn_worker()
        from .running_server import open_server  # here: it takes a second, as the worker does to import torch

        checks_model = worker_command == WORKER_MODULE
        server = await open_server(args, listener, processes, tokenizer_folder, checks_model=checks_model)
    except BaseException:
        await processes.stop(0.5)
        raise
    await server.run()


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket before anything expensive starts. Raises ServerFailure."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ServerFailure(f"cannot listen on {host}:{port}: {error.strerror}; use another --port or --host") from None
    listener.setblocking(False)
    return listener


def _allow_open_files(max_connections: int) -> None:
    """Every connection is one."""
    if (possible := allow_open_files(max_connections + _OTHER_FILES)) < max_connections + _OTHER_FILES:
        logger.warning(
            "only %d files may be open, too few for --max-connections %d: raise the hard limit (ulimit -Hn)",
            possible,
            max_connections,
        )


def _check_certificate(server: ServerConfig) -> None:
    """Load the certificate for HTTPS once, before a child starts. Raises ServerFailure."""
    if not server.ssl_certfile:
        return
    files = f"--ssl-certfile {server.ssl_certfile}"
    if server.ssl_keyfile:
        files += f", --ssl-keyfile {server.ssl_keyfile}"
    try:
        # Without a password function OpenSSL would ask the terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            server.ssl_certfile, server.ssl_keyfile or None, password=lambda: b""
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ServerFailure(f"{files}: {reason}; give PEM files, the key without a password") from None


if __name__ == "__main__":
    sys.exit(main())
