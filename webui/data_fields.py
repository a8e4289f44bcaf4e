"""The fields of the data page: what is looked at, for which model and method, and what its columns mean."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr

from tunekit import frontend
from webui.data_asked import EXAMPLE, Asked, data_files, methods
from webui.site import Site
from webui.uploads import SUFFIXES
from webui.words import Words

NUM_COLUMNS = 7
"""Most columns that a format has, needed and optional."""


class Fields:
    """The components, and how their values are read and written.

    Args:
        site: The workspace.
        words: The page's texts.
    """

    def __init__(self, site: Site, words: Words) -> None:
        self._words = words
        self.origin = gr.Textbox(visible=False)
        self.changes = gr.JSON([], visible=False)
        self.of_recipe = gr.HTML(visible=False, elem_id="data-origin", padding=False)
        with gr.Group(elem_id="data-fields") as self.group:
            self.path = gr.Dropdown(
                choices(site),
                value="",
                allow_custom_value=True,
                label=words("data.path"),
                info=words("data.path_help"),
                elem_id="data-path",
            )
            with gr.Row():
                self.method = gr.Dropdown(
                    [
                        (words.label(f"data.method_{name}", f"{name}: {info.title}"), name)
                        for name, info in methods().items()
                    ],
                    value="sft",
                    label=words("data.method"),
                    elem_id="data-method",
                    min_width=200,
                )
                self.model = gr.Textbox(
                    "pico",
                    label=words("data.model"),
                    info=words("data.model_help"),
                    elem_id="data-model",
                    min_width=200,
                )
                self.max_length = gr.Number(
                    1024,
                    precision=0,
                    minimum=8,
                    label=words("data.max_length"),
                    info=words("data.max_length_help"),
                    elem_id="data-length",
                    min_width=200,
                )
            self.rewards = gr.Textbox(
                "",
                label=words("data.rewards"),
                info=words("data.rewards_help"),
                placeholder="numeric_match",
                visible=False,
                elem_id="data-rewards",
            )
        self.key = gr.Dropdown([], label=words("data.source"), visible=False, elem_id="data-source")
        with gr.Row(elem_id="data-looking"):
            self.look = gr.Button(words("data.look"), variant="primary", elem_id="data-look", min_width=140)
            self.upload = gr.File(
                label=words("data.upload"),
                file_types=list(SUFFIXES),
                file_count="multiple",
                height=120,
                visible=not site.read_only,
                elem_id="data-upload",
                min_width=240,
            )

    def make_mapping(self) -> None:
        """The fields that say what columns mean; called where they are to stand."""
        words = self._words
        self.format = gr.Dropdown(
            [(words("data.format_auto"), "auto")],
            value="auto",
            label=words("data.format"),
            info=words("data.format_help"),
            elem_id="data-format",
        )
        self.names = gr.JSON([], visible=False)
        with gr.Row():
            self.columns = [
                gr.Dropdown([], visible=False, label="-", elem_id=f"data-column-{number}", min_width=200)
                for number in range(NUM_COLUMNS)
            ]

    @property
    def inputs(self) -> list[Any]:
        """The components whose values `asked` takes."""
        plain = [self.path, self.method, self.model, self.max_length, self.rewards, self.key, self.origin, self.changes]
        return [*plain, self.format, self.names, *self.columns]

    @property
    def filled(self) -> list[Any]:
        """The components that `fill` writes."""
        return [*self.inputs, self.group, self.of_recipe]

    @property
    def found(self) -> list[Any]:
        """The components that `update` writes."""
        return [self.format, self.names, *self.columns, self.key, self.rewards, self.method]

    def asked(self, *values: Any) -> Asked:
        """Return the values of the fields."""
        path, method, model, max_length, rewards, key, origin, changes, format, names, *columns = values
        mapping = {
            ours: theirs for ours, theirs in zip(names or [], columns, strict=False) if theirs and theirs != ours
        }
        return Asked(
            path=(path or "").strip(),
            method=method or "sft",
            model=(model or "").strip() or "pico",
            max_length=int(max_length or 0),
            format=format or "auto",
            columns=tuple(mapping.items()),
            rewards=rewards or "",
            origin=origin or "",
            changes=tuple(changes or []),
            key=key or None,
        )

    def fill(self, site: Site, asked: Asked) -> list[Any]:
        """The fields as something asks for them."""
        names = [ours for ours, _ in asked.columns]
        values = [
            gr.Dropdown(choices=choices(site), value=asked.path),
            asked.method,
            asked.model,
            asked.max_length,
            gr.Textbox(asked.rewards, visible=methods()[asked.method].is_rewarded),
            gr.Dropdown(choices=[asked.key] if asked.key else [], value=asked.key),
            asked.origin,
            list(asked.changes),
            gr.Dropdown(choices=[(self._words("data.format_auto"), "auto"), asked.format], value=asked.format),
            names,
        ]
        columns = [theirs for _, theirs in asked.columns][:NUM_COLUMNS]
        values += [gr.Dropdown(choices=[theirs], value=theirs) for theirs in columns]
        values += [gr.skip()] * (NUM_COLUMNS - len(columns))
        sentence = self._words("data.of_recipe", name=asked.origin.partition(":")[2]) if asked.origin else ""
        own = site.link(self._words.language, "data")
        note = f"<p>{escape(sentence)} <a href='{escape(own)}'>{escape(self._words('data.other_data'))}</a></p>"
        return [*values, gr.Group(visible=not asked.origin), gr.HTML(note, visible=bool(asked.origin))]

    def update(self, asked: Asked, preview: frontend.DataPreview) -> list[Any]:
        """The fields after a look: what the columns may mean, and which sources there are."""
        words = self._words
        names = [column.name for column in preview.columns]
        format_name = preview.format if asked.format == "auto" else asked.format
        shape = next((candidate for candidate in preview.formats if candidate.format == format_name), None)
        needed = () if shape is None or asked.origin else (*shape.needed, *shape.optional)[:NUM_COLUMNS]
        mapping = dict(asked.columns)
        columns = [
            gr.Dropdown(
                choices=[("–", ""), *names],
                value=mapping.get(ours, ours if ours in names else ""),
                label=words("data.column_for" if ours in shape.needed else "data.column_for_optional", name=ours),
                visible=True,
            )
            for ours in needed
            if shape is not None
        ]
        columns += [gr.Dropdown(visible=False, choices=[], value=None)] * (NUM_COLUMNS - len(columns))
        formats = [(words("data.format_auto"), "auto")] + [
            (f"{candidate.format}: {', '.join(candidate.needed)}", candidate.format) for candidate in preview.formats
        ]
        sources = [(f"{key}: {name}", key) for key, name in preview.sources]
        return [
            gr.Dropdown(choices=formats, value=asked.format, visible=not asked.origin),
            list(needed),
            *columns,
            gr.Dropdown(choices=sources, value=preview.key, visible=len(sources) > 1),
            gr.Textbox(visible=methods()[preview.method].is_rewarded and not asked.origin),
            preview.method,
        ]


def anew(asked: Asked) -> Asked:
    """The same, of other rows: what was said of the columns of those before is not said of these."""
    return replace(asked, format="auto", columns=(), key=None)


def choices(site: Site) -> Sequence[str]:
    """The files that are offered."""
    return [*data_files(site), *(EXAMPLE + name for name in frontend.list_examples())]
