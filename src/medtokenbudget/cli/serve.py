"""`mtb serve`: JSON API and explorer page of a trained model."""

from __future__ import annotations

from medtokenbudget.app.launch import ServeConfig
from medtokenbudget.cli.parsing import add_config, command_parser, pick


def main(arguments: list[str], name: str = "serve", open_browser: bool = False) -> int:
    parser = command_parser(
        name,
        "The explorer page of a trained model in the browser, and the same as a JSON API (POST /v1/route). "
        "Listens on this machine only unless told otherwise.",
        f"mtb {name} runs/demo/model --port 8765",
    )
    parser.add_argument(
        "model", nargs="?", default=None, help="Folder of a saved model, a run directory, or a hub id. Default: the demo's model."
    )
    add_config(parser, ServeConfig)
    options = parser.parse_args(arguments)

    from medtokenbudget.app.launch import serve

    serve(options.model, pick(options, ServeConfig), open_browser)
    return 0
