"""From the command line to the HTTP process: what it reads of the model directory, and the settings of the server."""

import argparse
import os
import socket

from tilerank.loader.tokenizer import Tokenizer

from .. import logs
from ..options import model
from ..processes.status import Reached, StatusPipe
from ..version import own_version
from . import http_options
from .grammar_trial import GrammarTrial
from .host_links import Front
from .http_process import Http, run
from .settings import server_settings
from .text_processes import TextProcesses
from .tracing import request_spans


def run_http_process(args: argparse.Namespace, listener: socket.socket, control: socket.socket) -> int:
    """Serve until the process is told to stop, as `http_process.run`."""
    logs.configure(0, args.log_level, prefix=False)
    model_dir = model.model_directory(args)
    tokenizer = Tokenizer(model.tokenizer_directory(args), args.chat_template)
    about = server_settings(
        args,
        tokenizer,
        TextProcesses(tokenizer),
        GrammarTrial(model_dir, tokenizer.model_dir).check,
        names=tuple(args.served_model_name or [model_dir.resolve().name]),
        version=own_version() or "unknown",
        api_keys=http_options.api_keys(args),
        strict_fields=args.strict_fields,
        open_metrics=args.metrics_no_key,
    )
    status = StatusPipe.inherited()
    status.send(Reached("listening"))
    with request_spans(about.models[0], about.version) as on_end:
        http = Http(
            listener,
            tokenizer,
            about,
            http_options.access(args, listener),
            args.max_queued_requests,
            http_options.tls(args),
            args.root_path,
            on_end,
            args.prefill_nodes is not None,
            Front.inherited(os.environ),
        )
        run(http, control, args.drain_timeout, lambda: status.send(Reached("serving")))
    return 0
