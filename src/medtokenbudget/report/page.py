"""The page: one HTML file with everything in it, for a phone, a desk or paper, light or dark, without the net.

Its own file because it only arranges: numbers come from the tables, sentences from `story.py`, words from `glossary.py`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from medtokenbudget import __version__
from medtokenbudget.files import sha256_file
from medtokenbudget.report import story
from medtokenbudget.report.evidence import CONTROLS, Evidence
from medtokenbudget.report.examples import KEPT_TINT, Example, Gallery
from medtokenbudget.report.glossary import TERMS
from medtokenbudget.report.intervals import Intervals
from medtokenbudget.report.style import LOST, look, ordered, svg_for_page
from medtokenbudget.report.table import Table

NOTICE = "Research software, not a medical device"


@dataclass(frozen=True)
class Plate:
    """One drawn figure: its file name, heading, caption, a text for those who cannot see it, and the SVG."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str

    def html(self) -> str:
        drawing = svg_for_page(self.svg, self.name, self.alt)
        return (
            f'<figure class="plate" id="figure-{self.name}"><h3>{escape(self.title)}</h3>{drawing}'
            f"<figcaption>{escape(self.caption)}</figcaption></figure>"
        )


@dataclass
class Section:
    """A part of the page; one without content is left out, also from the list of contents."""

    anchor: str
    title: str
    intro: str = ""
    parts: list[str] = field(default_factory=list)

    def html(self) -> str:
        intro = f"<p>{escape(self.intro)}</p>" if self.intro else ""
        return f'<section id="{self.anchor}"><h2>{escape(self.title)}</h2>{intro}{"".join(self.parts)}</section>'


def page(
    evidence: Evidence, intervals: Intervals, tables: Sequence[Table], plates: Sequence[Plate], gallery: Gallery | None
) -> str:
    """The whole HTML file."""
    made = _Parts({t.name: t for t in tables}, {p.name: p for p in plates})
    sections = [s for s in _sections(evidence, intervals, made, gallery) if s.parts]
    style = files("medtokenbudget.report").joinpath("page.css").read_text(encoding="utf-8")
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in sections)
    title = f"Token routing on {evidence.dataset}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · MedTokenBudget</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(story.measured(evidence))}</p>'
        f'<p class="notice">{NOTICE}</p><nav aria-label="Contents"><ul>{links}</ul></nav></header>\n<main>\n'
        + "\n".join(s.html() for s in sections)
        + f"\n</main>\n<footer><p>MedTokenBudget {__version__}. {NOTICE}: nothing here may guide a diagnosis or a "
        "treatment.</p></footer>\n"
        "</body>\n</html>\n"
    )


class _Parts:
    """Tables and figures by name, as HTML; what is not there gives nothing."""

    def __init__(self, tables: dict[str, Table], plates: dict[str, Plate]) -> None:
        self._tables, self._plates = tables, plates

    def tables(self, *names: str) -> list[str]:
        return [self._tables[name].html() for name in names if name in self._tables]

    def plates(self, *names: str) -> list[str]:
        drawn = [self._plates[name].html() for name in names if name in self._plates]
        return [f'<div class="plates">{"".join(drawn)}</div>'] if drawn else []


def _sections(evidence: Evidence, intervals: Intervals, made: _Parts, gallery: Gallery | None) -> list[Section]:
    return [
        Section("summary", "In short", "", _summary(evidence, intervals)),
        Section(
            "retention",
            "Does the lesion survive?",
            "How much of the lesion is among the kept patches, beside what is possible at all and what chance gives.",
            [*made.plates("retention", "share-of-ceiling"), *made.tables("main", "retention-sweep")],
        ),
        Section(
            "center",
            "Is it more than the center of the image?",
            "Dermoscopy is taken with the lesion in the middle, so keeping the middle is a strong control. Views in "
            "which the lesion is elsewhere tell a router that sees it from one that guesses.",
            [*made.plates("center-bias"), *made.tables("center-bias")],
        ),
        Section(
            "classification",
            "Is the diagnosis still right?",
            "Classification on the kept patches alone. Each method has a head of its own, trained on what that method keeps.",
            [
                *made.plates("accuracy", "macro-f1", "accuracy-against-retention", "reliability"),
                *made.tables("accuracy-sweep", "macro-f1-sweep", "further-measures"),
            ],
        ),
        Section("failures", "Where it fails", "", _failures(evidence, intervals, made, gallery)),
        Section("examples", "Examples", "", _typical(gallery)),
        Section(
            "inside",
            "Inside the router",
            "How LATS was trained, how well its scores tell lesion from skin, and whether that explains its retention.",
            made.plates("curriculum", "scores", "retention-model"),
        ),
        Section(
            "studies",
            "Studies",
            "Variations of the training and of the scorer, each with the controls beside it.",
            made.tables("robustness", "paired-seeds", "mask-free", "signals", "curriculum", "toggles", "epochs", "kvasir"),
        ),
        Section(
            "recipe",
            "What each part of our preset brings",
            "The lesion-first preset with one part taken back at a time, beside the paper's own recipe and the controls.",
            made.tables("recipe"),
        ),
        Section(
            "significance",
            "How sure are the differences?",
            "Every method against LATS, by the paper's recipe and by ours, on the same images.",
            made.tables("significance-lats", "significance-lats-lesion-first", "significance-lats-lesion-first-off-center"),
        ),
        Section(
            "paper",
            "Beside the paper",
            "The paper's numbers come from ISIC 2019 with a DINOv2 ViT-B/14 and are shown for comparison only: other "
            "images, another backbone or another split give other numbers, and a difference is not an error by itself.",
            made.tables("beside-paper"),
        ),
        Section("data", "The images", "", made.tables("subset", "prevalence")),
        Section("words", "Words used here", "", [_glossary(evidence)]),
        Section("provenance", "Where the numbers come from", "", _provenance(evidence)),
    ]


def _summary(evidence: Evidence, intervals: Intervals) -> list[str]:
    facts = "".join(
        f'<li><span class="value">{escape(f.value)}</span><span class="label">{escape(f.label)}</span>'
        f'<span class="beside">{escape(f.beside)}</span></li>'
        for f in story.facts(evidence, intervals)
    )
    said = "".join(f"<li>{escape(text)}</li>" for text in story.headline(evidence, intervals))
    return [
        f"<p>{escape(story.question())}</p>",
        f'<ul class="facts">{facts}</ul>' if facts else "",
        f"<ul>{said}</ul>" if said else "",
    ]


def _failures(evidence: Evidence, intervals: Intervals, made: _Parts, gallery: Gallery | None) -> list[str]:
    said = "".join(f"<li>{escape(text)}</li>" for text in story.failures(evidence, intervals))
    parts = [f"<ul>{said}</ul>", *made.plates("size-strata", "class-strata"), *made.tables("size-strata", "class-strata")]
    if gallery is not None and gallery.worst:
        count, budget = len(gallery.worst), f"{gallery.budget:g}"
        intro = f"The {count} images of which LATS kept least at budget {budget}, measured against what was possible."
        parts += [f"<p>{escape(intro)}</p>", _key(), *[_example(e) for e in gallery.worst]]
    return [*parts, *made.tables("worst")]


def _typical(gallery: Gallery | None) -> list[str]:
    if gallery is None or not gallery.typical:
        return []
    intro = (
        f"What each method keeps at budget {gallery.budget:g} ({gallery.k} patches). The images are chosen by rule: at the 90th, "
        "50th and 25th percentile of the share of the possible lesion patches that LATS kept."
    )
    return [f"<p>{escape(intro)}</p>", _key(), *[_example(e) for e in gallery.typical]]


def _key() -> str:
    entries = ((KEPT_TINT, "lesion, kept"), (LOST, "lesion, lost"), ("#d9a58f", "skin, kept"), ("#e6e6e6", "skin, dropped (faded)"))
    return '<ul class="key">' + "".join(f'<li><i style="background:{c}"></i>{t}</li>' for c, t in entries) + "</ul>"


def _example(example: Example) -> str:
    tiles = "".join(
        f'<figure><img alt="{escape(f"{t.title} of {example.image_id}: {t.caption}", quote=True)}" width="{t.picture.width}" '
        f'height="{t.picture.height}" src="data:image/jpeg;base64,{base64.b64encode(t.jpeg()).decode()}">'
        f"<figcaption><b>{escape(t.title)}</b>{escape(t.caption)}</figcaption></figure>"
        for t in example.tiles
    )
    head = f"{escape(example.image_id)} · {escape(example.reason)}"
    return f'<div class="example"><h3>{head}</h3><p>{escape(example.text)}</p><div class="tiles">{tiles}</div></div>'


def _glossary(evidence: Evidence) -> str:
    methods = ordered([*evidence.results["method"], *CONTROLS])
    named = "".join(f"<dt>{escape(look(m).name)} <code>{escape(m)}</code></dt><dd>{escape(look(m).about)}</dd>" for m in methods)
    terms = "".join(f"<dt>{escape(t)}</dt><dd>{escape(text)}</dd>" for t, text in TERMS.items())
    return f"<h3>Methods</h3><dl>{named}</dl><h3>Measures</h3><dl>{terms}</dl>"


def _provenance(evidence: Evidence) -> list[str]:
    info, run = evidence.info, evidence.run
    parts = [
        "<p>Every number on this page follows from <code>results.csv</code> and <code>predictions.parquet</code> in the run's "
        "folder. The tables are there as CSV, Markdown and LaTeX, the figures as SVG and PNG.</p>"
    ]
    rows: dict[str, Any] = {"Data set": evidence.dataset, "Seeds": ", ".join(map(str, info.get("seeds", evidence.seeds)))}
    backbone = info.get("backbone")
    if isinstance(backbone, dict):
        rows["Backbone"] = ", ".join(f"{k} {v}" for k, v in backbone.items() if isinstance(v, (str, int, float)))
    if info.get("command"):
        rows["Made with"] = info["command"]
    rows["This page"] = f"mtb report {run.name}"
    rows |= {f"sha256 of {name}": sha256_file(run / name) for name in ("results.csv", "predictions.parquet")}
    rows |= {f"hash of the {name}": value for name, value in dict(info.get("hashes", {})).items()}
    rows["Versions"] = ", ".join(f"{name} {value}" for name, value in dict(info.get("versions", {})).items())
    parts.append("<dl>" + "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in rows.items()) + "</dl>")
    if evidence.missing:
        parts.append("<h3>Not shown</h3><ul>" + "".join(f"<li>{escape(text)}</li>" for text in evidence.missing) + "</ul>")
    shown = json.dumps(info, indent=1, sort_keys=True, ensure_ascii=False, default=str)
    parts.append(f"<details><summary>run.json: the whole configuration</summary><pre>{escape(shown)}</pre></details>")
    return parts
