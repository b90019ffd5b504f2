"""The page of one run. It only arranges: numbers come from the tables, sentences from `story.py`, terms from `glossary.py`."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape

from medtokenbudget.files import read_json, sha256_file
from medtokenbudget.reporting import story
from medtokenbudget.reporting.document import Parts, Plate, Section, bullets, document, terms, text
from medtokenbudget.reporting.evidence import Evidence
from medtokenbudget.reporting.examples import KEPT_TINT, Example, Gallery
from medtokenbudget.reporting.external_tables import how_measured
from medtokenbudget.reporting.glossary import TERMS
from medtokenbudget.reporting.intervals import Intervals
from medtokenbudget.reporting.looks import CONTROLS, look
from medtokenbudget.reporting.numbers import budget_text
from medtokenbudget.reporting.style import LOST
from medtokenbudget.reporting.table import Table
from medtokenbudget.runs import paper


def page(
    evidence: Evidence, intervals: Intervals, tables: Sequence[Table], plates: Sequence[Plate], gallery: Gallery | None
) -> str:
    """The whole HTML file of one run."""
    sections = _sections(evidence, intervals, Parts(tables, plates), gallery)
    return document(f"Token selection on {evidence.dataset}", story.measured(evidence), sections)


def _sections(evidence: Evidence, intervals: Intervals, made: Parts, gallery: Gallery | None) -> list[Section]:
    return [
        Section("summary", "Summary", story.question(), _summary(evidence, intervals)),
        Section(
            "external",
            "Is it as good as on its own validation images?",
            "This model was trained and validated on other images; nothing was trained for this page.",
            made.tables("own-validation", "promises"),
        ),
        Section(
            "retention",
            "Is the lesion kept?",
            "How much of the lesion is among the kept patches, compared with the highest possible value and with chance."
            if evidence.n_masked
            else "",
            [*made.plates("retention", "share-of-ceiling"), *made.tables("main", "retention-sweep")],
        ),
        Section(
            "center",
            "Is it better than keeping the image center?",
            "In dermoscopy the lesion is usually in the middle of the image, so keeping the middle is a strong control. Views with "
            "the lesion elsewhere separate a selector that finds the lesion from one that keeps the middle.",
            [*made.plates("center-bias"), *made.tables("center-bias")],
        ),
        Section(
            "classification",
            "Is the classification still right?" if evidence.classes else "Further measures",
            "Classification from the kept patches only. Each method has its own classifier, trained on the patches that the "
            "method keeps."
            if evidence.classes
            else "The images have no class labels, so there is no classification to judge: the routers of this run have no head.",
            [
                *made.plates("accuracy", "macro-f1", "accuracy-against-retention", "reliability"),
                *made.tables("accuracy-sweep", "macro-f1-sweep", "further-measures"),
            ],
        ),
        Section(
            "significance",
            "Are the differences reliable?",
            "Paired tests on the same images.",
            made.tables("significance"),
        ),
        Section("failures", "Where it fails", "", _failures(evidence, intervals, made, gallery)),
        Section("examples", "Examples", "", _typical(evidence, gallery)),
        Section(
            "inside",
            "Inside the selector",
            f"How {look(evidence.focus).name} was trained, how well its scores separate lesion from skin, and whether that "
            "explains its retention.",
            made.plates("curriculum", "scores", "retention-model"),
        ),
        Section(
            "studies",
            "Further studies",
            "Variations of the training and of the scorer, each with the controls beside it.",
            made.tables(
                "robustness",
                "paired-seeds",
                "paired-seeds-paper",
                "mask-free",
                "signals",
                "curriculum",
                "toggles",
                "epochs",
                "kvasir",
            ),
        ),
        Section(
            "recipe",
            "What each part of the lesion-first recipe contributes",
            "The lesion-first recipe with one part changed at a time, beside the paper's own recipe and the controls.",
            made.tables("recipe"),
        ),
        Section(
            "paper",
            "Comparison with the paper",
            f"The paper's numbers are for {paper.DATASETS.get(evidence.source)} with a DINOv2 ViT-B/14. With another backbone or "
            "another split, different numbers are expected.",
            made.tables("beside-paper"),
        ),
        Section("data", "The images", "", made.tables("subset", "prevalence")),
        Section("glossary", "Glossary", "", [_glossary(evidence)]),
        Section("provenance", "Reproducibility", "", _provenance(evidence)),
    ]


def _summary(evidence: Evidence, intervals: Intervals) -> list[str]:
    facts = "".join(
        f'<li><span class="value">{escape(f.value)}</span><span class="label">{escape(f.label)}</span>'
        f'<span class="beside">{text(f.beside)}</span></li>'
        for f in story.facts(evidence, intervals)
    )
    return [f'<ul class="facts">{facts}</ul>' if facts else "", bullets(story.headline(evidence, intervals))]


def _failures(evidence: Evidence, intervals: Intervals, made: Parts, gallery: Gallery | None) -> list[str]:
    parts = [bullets(story.failures(evidence, intervals))]
    parts += [
        *made.plates("size-strata", "class-strata"),
        *made.tables("size-strata", "class-strata", "lost-places", "attribute-strata"),
    ]
    parts.append(bullets(how_measured(evidence)))
    if gallery is not None and gallery.worst:
        intro = (
            f"The {len(gallery.worst)} images with the lowest retention of {look(evidence.focus).name} at budget "
            f"{budget_text(gallery.budget)}, measured against what was possible."
        )
        parts += [f"<p>{escape(intro)}</p>", _key(), *[_example(e) for e in gallery.worst]]
    return [*parts, *made.tables("worst")]


def _typical(evidence: Evidence, gallery: Gallery | None) -> list[str]:
    if gallery is None or not gallery.typical:
        return []
    intro = (
        f"What each method keeps at budget {budget_text(gallery.budget)} ({gallery.k} patches). The images are chosen by a fixed "
        f"rule: the 90th, 50th and 25th percentile of retention of {look(evidence.focus).name}, measured against what was possible."
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
    methods = evidence.ordered([*evidence.results["method"], *CONTROLS])
    named = terms((f"{escape(look(m).name)} <code>{escape(m)}</code>", escape(look(m).about)) for m in methods)
    return f"<h3>Methods</h3>{named}<h3>Measures and terms</h3>{terms((escape(t), escape(what)) for t, what in TERMS.items())}"


def _provenance(evidence: Evidence) -> list[str]:
    info, run = evidence.info, evidence.run
    rows = {"Data set": f"{evidence.dataset} ({info.source})" if info.source else evidence.dataset}
    rows["Seeds"] = ", ".join(map(str, info.seeds or evidence.seeds))
    if info.backbone:
        rows["Backbone"] = ", ".join(f"{k} {v}" for k, v in info.backbone.items() if isinstance(v, (str, int, float)))
    if info.command:
        rows["Command"] = info.command
    rows["This page"] = f"mtb report {run.name}"
    rows |= {f"SHA-256 of {name}": sha256_file(run / name) for name in ("results.csv", "predictions.parquet")}
    rows |= {f"Hash of the {name}": str(value) for name, value in info.hashes.items()}
    rows["Versions"] = ", ".join(f"{name} {value}" for name, value in info.versions.items())
    shown = json.dumps(read_json(run / "run.json"), indent=1, sort_keys=True, ensure_ascii=False)
    return [
        "<p>Every number on this page comes from <code>results.csv</code>; intervals, tests and strata are computed from "
        "<code>predictions.parquet</code>. Both are in the run directory. The folder of this page has all tables as CSV, Markdown "
        "and LaTeX and all figures as SVG and PNG.</p>",
        terms((escape(name), escape(value)) for name, value in rows.items()),
        f"<h3>Not shown</h3>{bullets(evidence.missing)}" if evidence.missing else "",
        f"<details><summary>run.json: the full configuration</summary><pre>{escape(shown)}</pre></details>",
    ]
