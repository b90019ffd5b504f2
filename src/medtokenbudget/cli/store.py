"""`mtb store`: what is inside a store of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medtokenbudget.cli.help import command_list
from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.errors import UnknownNameError, WorkError

COMMANDS = {
    "info": "backbone, views, images, size and manifests of a store",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        last = "Run `mtb store COMMAND --help` for the options of a command."
        print(command_list("mtb store COMMAND ...", "Look into a store of tokens.", COMMANDS, last))
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        raise UnknownNameError.of("command of mtb store", name, COMMANDS)
    return _info(arguments[1:])


def _info(arguments: list[str]) -> int:
    parser = command_parser("store info", "Show what is inside a store.", "mtb store info stores/isic")
    parser.add_argument("store", type=Path, help="Folder of the store.")
    parser.add_argument("--json", action="store_true", help="Everything as JSON.")
    given = parser.parse_args(arguments)

    from medtokenbudget.backbone.store import info

    found = info(given.store)
    print(json.dumps(found, indent=2, ensure_ascii=False) if given.json else _text(found))
    if found["damaged"]:
        names = ", ".join(found["damaged"])
        raise WorkError(f"Damaged files in {given.store}: {names}. Delete them and run its `mtb extract` command again.")
    return 0


def _text(found: dict[str, Any]) -> str:
    backbone = found["settings"]["backbone"]
    h, w = backbone["grid"]
    views = {"as-is" if view == "identity" else view: count for view, count in found["views"].items()}
    lines = [
        f"{found['path']}: {found['images']:,} images, {found['rows']:,} rows, {found['bytes'] / 1e6:,.1f} MB",
        f"  backbone   {backbone['name']}, {backbone['image_size']} pixels, {h} x {w} patches of {backbone['dim']} numbers",
        f"  weights    SHA-256 {backbone['weights']}",
        f"  tokens     {'all patches' if found['settings']['keep'] == 'patches' else 'routed'}, {found['settings']['dtype']}",
        f"  signals    {', '.join(found['signals']) or 'none'}",
        f"  views      {', '.join(f'{count:,} {view}' for view, count in views.items()) or 'none'}",
        f"  shards     {found['shards']:,}, {found['missing_shards']:,} missing; {found['failed']:,} rows failed",
    ]
    for one in found["manifests"]:
        fits = "fits" if one["fits"] else f"{one['images'] - one['present']:,} images are not extracted"
        lines.append(f"  manifest   {one['name']} ({one['source']}): {one['images']:,} images, {fits}")
    return "\n".join(lines)
