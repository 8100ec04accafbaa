"""One server, from the moment its worker has been started until its children have been stopped.

`launch_server` imports this once the worker imports torch: it takes a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from ..runtime.checkpoint.folder_check import check_folder
from ..runtime.checkpoint.hf_config import load_sampling_defaults
from ..runtime.checkpoint.model_files import ModelLoadError, resolve_model_folder
from ..runtime.clients import SOLE_CLIENT
from ..runtime.launcher.server_processes import ServerProcesses
from ..runtime.load_log import LoadLog
from ..runtime.lora.adapter_config import read_adapter_config
from ..runtime.metrics import ServerMetrics
from ..runtime.recording.recorder import RecordingError, open_recorder
from ..runtime.request_log import TEXT_LEVEL, RequestLog
from ..runtime.settled_memory import settle_memory
from ..runtime.text.tokenizer import Tokenizer, TokenizerError
from ..runtime.tokenizer_manager import TokenizerManager
from ..scheduler.outcome import RequestRefused
from .chat.setup import ChatSetup, ChatSetupError
from .http.health_routes import Readiness, probe_of
from .http.keys import Keys, exposure_warning, read_keys
from .http.server import build_app
from .http.wire.connection import Connection, ConnectionLimits, protocol_class
from .program import ServerFailure
from .server_config import ServerArgs, ServerConfig

logger = logging.getLogger(__name__)

_CLOSE_S = 2.0
"""Seconds that open connections get to close once their calls have ended."""

_RESUME_S = 2.0
"""Seconds to wait for a paused worker to confirm that it has resumed."""

_WATCHDOG_CHECK_S = 1.0


async def open_server(
    args: ServerArgs, listener: socket.socket, processes: ServerProcesses, tokenizer_folder: str, *, checks_model: bool
) -> Server:
    """Check what can be checked without the model, start the detokenizer and send the children their configs.
    checks_model: the worker is the real one. Raises ServerFailure, and UsageError for keys that cannot be read."""
    keys = read_keys(args.server, os.environ)
    if warning := exposure_warning(args.server.host, keys):
        logger.warning("%s", warning)
    try:
        tokenizer = Tokenizer.load(tokenizer_folder)
        chat = ChatSetup(args.chat, tokenizer)
        defaults = _sampling_defaults(args)
        if checks_model:
            folder = resolve_model_folder(args.model.model_path)
            check_folder(folder, args.model, context_length=args.scheduler.context_length)
            for adapter in args.worker_config.adapters.values():
                read_adapter_config(Path(adapter))
        metrics = ServerMetrics(args.served_model_name)
        recorder = open_recorder(args.recording, metrics)
    except (ModelLoadError, TokenizerError, ChatSetupError, RecordingError) as error:
        raise ServerFailure(str(error)) from None
    load_log = LoadLog(args.server.log_interval)
    manager = TokenizerManager(
        tokenizer=tokenizer,
        endpoints=await processes.start(),
        metrics=metrics,
        read_calls=chat.read_calls,
        recorder=recorder,
        load_log=load_log,
        request_log=_request_log(args.server),
    )
    return Server(args, keys, listener, manager, chat, defaults, processes, load_log)


def _sampling_defaults(args: ServerArgs) -> dict[str, Any]:
    """Sampling parameters for requests of OpenAI's and Anthropic's APIs that leave them out. Raises ModelLoadError."""
    if args.server.sampling_defaults == "openai":
        return {}
    return load_sampling_defaults(resolve_model_folder(args.model.model_path))


def _request_log(server: ServerConfig) -> RequestLog | None:
    if not server.log_requests:
        return None
    if server.log_requests_level >= TEXT_LEVEL:
        logger.warning("--log-requests-level %d: prompts and answers are in the log", server.log_requests_level)
    return RequestLog(server.log_requests_level)


class Server:
    """One server, from the moment its children have been started until they have been stopped."""

    def __init__(
        self,
        args: ServerArgs,
        keys: Keys,
        listener: socket.socket,
        manager: TokenizerManager,
        chat: ChatSetup,
        defaults: dict[str, Any],
        processes: ServerProcesses,
        load_log: LoadLog,
    ) -> None:
        """defaults: sampling parameters for what requests leave out."""
        self._load_log = load_log
        self._args = args
        self._defaults = defaults
        self._chat = chat
        self._listener = listener
        self._processes = processes
        self._manager = manager
        self._state = Readiness()
        limits = ConnectionLimits(
            connections=args.server.max_connections,
            head_s=args.server.header_timeout,
            body_s=args.server.body_timeout,
        )
        self._http = _HttpServer(
            uvicorn.Config(
                build_app(self._manager, args, self._state, keys, chat, defaults),
                http=protocol_class(limits),
                ws="none",
                log_config=None,
                access_log=args.server.log_level == "debug",
                lifespan="off",
                server_header=False,
                timeout_keep_alive=args.server.keep_alive_timeout,  # type: ignore[arg-type]  # any number will do
                ssl_certfile=args.server.ssl_certfile or None,
                ssl_keyfile=args.server.ssl_keyfile or None,
            )
        )
        self._signalled = asyncio.Event()

    async def run(self) -> None:
        """Return after a clean end; raise ServerFailure after any other."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._serve_http())
        tasks = [asyncio.create_task(self._manager.run())]
        try:
            tasks.append(asyncio.create_task(self._come_up()))
            tasks.append(asyncio.create_task(self._watch_children()))
            tasks.append(asyncio.create_task(self._watch_heartbeat()))
            await self._until_end([http, *tasks])
            await self._drain()
        except Exception as error:
            # Answer the clients that wait before HTTP closes.
            failed = RequestRefused(f"the server failed: {error}", code="server_failed")
            self._manager.fail_all(failed)
            self._http.refuse_uploads(failed)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await self._close_http(http)
            # A worker that is still loading its model would not react in time, and has nothing to lose.
            await self._processes.stop(grace_s=5.0 if self._state.warmed_up else 0.5)
            self._manager.close()

    async def _until_end(self, tasks: list[asyncio.Task]) -> None:
        """Wait for a signal, and raise whatever a task raises. A task may end by itself (coming up, HTTP)."""
        signalled = asyncio.create_task(self._signalled.wait())
        pending = {signalled, *tasks}
        try:
            while not signalled.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            signalled.cancel()

    async def _serve_http(self) -> None:
        await self._http.serve(sockets=[self._listener])
        if not self._http.should_exit:
            raise ServerFailure("the HTTP server ended by itself; its log is above")

    async def _come_up(self) -> None:
        """Wait for the worker, then for a first answer that passes through all processes."""
        try:
            await asyncio.wait_for(self._manager.wait_ready(), self._args.server.ready_timeout)
        except TimeoutError:
            await self._processes.dump()
            timeout = self._args.server.ready_timeout
            raise ServerFailure(f"the worker was not ready within {timeout:g} s; see --ready-timeout") from None
        prompt = probe_of("server-warm-up", generates=self._manager.limits.generates)
        try:
            with await self._manager.open_answer(SOLE_CLIENT, [prompt], stream=False) as answer:
                await answer.outputs()
        except RequestRefused as error:
            raise ServerFailure(f"the warm-up request failed: {error.message}") from None
        self._chat.log()
        if self._defaults:
            logger.info(
                "sampling defaults of the model's generation_config.json: %s; --sampling-defaults openai ignores them",
                ", ".join(f"{name} {value}" for name, value in self._defaults.items()),
            )
        logger.info("random seed: %d; --random-seed repeats it", self._args.scheduler.random_seed)
        self._processes.all_connected()
        settle_memory()  # a full collection would stop the process to find every module alive once more
        self._state.warmed_up = True
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._args.server.ssl_certfile else "http"
        logger.info("ready: %s on %s://%s:%d", self._args.served_model_name, scheme, host, port)
        if self._args.server.dashboard:
            logger.info("dashboard: %s://%s:%d/dashboard", scheme, host, port)

    async def _watch_children(self) -> None:
        raise ServerFailure(str(await self._processes.first_exit()))

    async def _watch_heartbeat(self) -> None:
        limit = self._args.server.watchdog_timeout
        await self._manager.wait_ready()
        while self._manager.seconds_since_heartbeat <= limit:
            await asyncio.sleep(_WATCHDOG_CHECK_S)
        await self._processes.dump()
        raise ServerFailure(f"the worker has been silent for {limit:g} s; it hangs (its stacks are above)")

    async def _drain(self) -> None:
        """Let open requests finish, until the deadline or a second signal; then end them."""
        # Keep listening: probes read why they are refused.
        closing = RequestRefused("the server is shutting down", code="shutting_down")
        if self._manager.control.paused:  # else nothing that is open would ever end
            with contextlib.suppress(RequestRefused):
                await self._manager.control.resume(timeout_s=_RESUME_S)
        self._manager.refuse_new(closing)
        self._http.refuse_uploads(closing)
        had_open = self._manager.num_open > 0
        if had_open:
            timeout = self._args.server.drain_timeout
            logger.info(
                "shutting down: %d open requests get up to %g s; another signal ends them at once",
                self._manager.num_open,
                timeout,
            )
        self._signalled.clear()
        died = asyncio.create_task(self._processes.first_exit())
        waits = [asyncio.create_task(self._manager.wait_empty()), asyncio.create_task(self._signalled.wait()), died]
        await asyncio.wait(waits, timeout=self._args.server.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if num_open := self._manager.num_open:
            logger.info("shutting down: %d requests are not done, and end now", num_open)
        elif had_open:
            logger.info("shutting down: all open requests are done")
        if died.done() and not died.cancelled():
            raise ServerFailure(f"while shutting down, {died.result()}")
        self._manager.fail_all(RequestRefused("the server has shut down", code="shutting_down"))
        self._load_log.log_totals()

    async def _close_http(self, http: asyncio.Task) -> None:
        self._http.should_exit = True
        done, _ = await asyncio.wait([http], timeout=_CLOSE_S)
        if not done:
            self._http.force_exit = True
            done, _ = await asyncio.wait([http], timeout=_CLOSE_S)
        if not done:
            http.cancel()
        with contextlib.suppress(asyncio.CancelledError, ServerFailure):
            await http

    def _on_signal(self) -> None:
        self._signalled.set()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: on a signal, `Server` drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def refuse_uploads(self, error: RequestRefused) -> None:
        """Answer all requests that are still sending a body."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.refuse_upload(error)
