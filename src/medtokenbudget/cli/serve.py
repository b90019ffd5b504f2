"""`mtb serve`: the JSON API and explorer page of a trained model."""

from __future__ import annotations

import importlib.util

from medtokenbudget.cli.parsing import add_config, command_parser, pick
from medtokenbudget.config import ServeConfig
from medtokenbudget.errors import RequestError

SUMMARIES = {
    "serve": "Serve a model: the explorer page for the browser, and the same as a JSON API (POST /v1/route).",
    "explore": "Serve a model and open its explorer page in the browser. The same as `mtb serve`, plus the browser.",
}


def main(arguments: list[str], name: str = "serve", open_browser: bool = False) -> int:
    summary = f"{SUMMARIES[name]} Only this machine can connect, unless you set --host and a token."
    parser = command_parser(name, summary, f"mtb {name} runs/demo/model --port 8765")
    parser.add_argument(
        "model",
        nargs="?",
        default=None,
        help="Folder of a saved model, a run directory, or a hub id. Default: the dermoscopy router of the package.",
    )
    add_config(parser, ServeConfig, "Limits", first={"host", "port", "token_file", "weights", "device"})
    options = parser.parse_args(arguments)

    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"The server needs {', '.join(missing)}. Run `pip install 'medtokenbudget[serve]'`.")

    from medtokenbudget.serve.server import serve

    serve(options.model, pick(options, ServeConfig), open_browser)
    return 0
