"""`python -m baton.entrypoints.analyze LOG`: the effect of a prefix cache on the requests of a log. See
docs/analyze.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from ...runtime.text.chat_template import ChatTemplate, ChatTemplateError
from ...runtime.text.tokenizer import Tokenizer, TokenizerError
from ..chat.rendering import Renderer
from ..chat.template_choice import choose_templates
from ..program import run_program
from .analysis import Analysis
from .arguments import parse
from .log.log_file import LogFile
from .log.log_reader import LogReader, ReadOptions, refuse_empty
from .log.logged_request import LogError
from .log.prompt_text import BYTES_PER_TOKEN, PromptText
from .log_report import make_report
from .model_config_size import read_model_size
from .model_size import ModelSize, ModelSizeError
from .pool_sizes import GIB, PoolSizes
from .report_table import show
from .reuse.curve import sizes


class OutputError(ValueError):
    """The report cannot be written; the message says why."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return run_program("baton analyze", lambda: analyze(args))
    except (LogError, ModelSizeError, TokenizerError, ChatTemplateError, OutputError) as error:
        print(f"baton analyze: {error}", file=sys.stderr)
        return 2


def analyze(args: argparse.Namespace) -> int:
    if args.plot is not None:
        _need_matplotlib()
    sizes = PoolSizes(model_size(args), args.page_size or 1, args.swa_full_tokens_ratio)
    text = prompt_text(args)
    pool = args.pool_tokens or (sizes.device_tokens(args.pool_gb) if args.pool_gb is not None else None)
    options = ReadOptions(args.format, args.page_size, args.block_tokens, args.max_line_mb << 20, args.max_requests)
    has_states = sizes.model is not None and sizes.model.bytes_per_state > 0
    with LogFile(args.log) as file:
        reader = LogReader(file, text, options)
        analysis = read_through(file, reader, int(args.memory_gb * GIB), pool, has_states=has_states)
    if analysis is None:
        raise refuse_empty(reader)
    if not text.has_tokens and "bytes count as a token" in analysis.units.what:
        reader.story.notes.append("texts were counted by their bytes; --tokenizer counts tokens")
    report = make_report(analysis, reader.story, sizes=sizes, pool_tokens=pool, reach=tuple(args.reach))
    try:
        write(report, args.json, args.plot)  # first: the reader of the table may leave
    finally:
        show(report)
    return 0


def model_size(args: argparse.Namespace) -> ModelSize | None:
    """None if no flag says it. Raises ModelSizeError."""
    if args.kv_bytes_per_token is not None:
        return ModelSize(bytes_per_token=args.kv_bytes_per_token, bytes_per_state=args.bytes_per_state or 0)
    return read_model_size(args.model) if args.model is not None else None


def read_through(
    file: LogFile, reader: LogReader, max_bytes: int, pool_tokens: int | None, *, has_states: bool
) -> Analysis | None:
    """None for a log without requests. pool_tokens: a size to add to the grid of the curves. has_states: the model has
    recurrent states."""
    analysis = None
    with tqdm(total=file.size, unit="B", unit_scale=True, desc="reading", disable=None, file=sys.stderr) as bar:
        for request in reader.requests(lambda read: bar.update(read - bar.n)):
            if analysis is None:
                assert reader.reader is not None and reader.reader.units is not None
                units = reader.reader.units
                extra = {pool_tokens // units.tokens} if pool_tokens else set()
                grid = sorted({*sizes(), *extra})
                analysis = Analysis(
                    units,
                    max_bytes=max_bytes,
                    has_times=request.time is not None,
                    grid=grid,
                    has_states=has_states,
                )
            analysis.add_request(request)
    if analysis is not None:
        analysis.end_log()
    return analysis


def prompt_text(args: argparse.Namespace) -> PromptText:
    """Raises TokenizerError, ChatTemplateError."""
    folder = args.tokenizer
    if folder is None and args.model is not None and (args.model / "tokenizer.json").is_file():
        folder = args.model
    if folder is None:
        if args.chat_template is not None:
            raise ChatTemplateError(f"--chat-template: there is no tokenizer.json in {args.model}; give --tokenizer")
        return PromptText(bytes_per_token=args.bytes_per_token or BYTES_PER_TOKEN)
    tokenizer = Tokenizer.load(folder)
    if args.chat_template is None:
        return PromptText(tokenizer)
    try:
        source = args.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"--chat-template {args.chat_template}: {error}") from None
    return PromptText(tokenizer, Renderer(choose_templates(tokenizer, ChatTemplate(source, tokenizer.special_tokens))))


def write(report: dict, json_path: Path | None, plot_path: Path | None) -> None:
    """Raises OutputError."""
    try:
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if plot_path is not None:
            from .report_plots import plot

            plot(report, plot_path)
    except OSError as error:
        raise OutputError(f"the report cannot be written: {error}") from None


def _need_matplotlib() -> None:
    """Raises OutputError, before the log is read for an hour."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OutputError("--plot needs matplotlib, which is not installed: pip install 'baton-serve[bench]'") from None


if __name__ == "__main__":
    sys.exit(main())
