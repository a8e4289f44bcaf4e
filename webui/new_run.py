"""The page of a new run: a form and the recipe's YAML, which say the same, and what becomes of it.

The draft is the YAML. It lives in the browser (`gr.BrowserState`), never here. A change in the form is laid over it, a
change in the YAML is shown by the form, and each change is checked as the command line would.
"""

import json
import time
from functools import partial
from html import escape
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui import draft, plan_panel, sweep_panel
from webui.fields import shown
from webui.form import Form, classes_of, faults_by_entry, info_of, make_form
from webui.form_lock import ACT, DONE, EDIT, FIELDS, MERGED, SETTLED, WANT, make_lock, make_mark, send
from webui.hub_search import search_models
from webui.in_order import attach_in_order
from webui.site import Site
from webui.words import Words, told

STORAGE_KEY = "tunekit-draft"
_FORGET_QUERY = "() => { history.replaceState(null, '', location.pathname); }"
_QUIET: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
_KEEP = "(text, source, kept) => text ? {text, source} : kept"


class NewRun:
    """The components of the page, and what happens between them.

    Args:
        site: The workspace.
        words: The texts.
    """

    def __init__(self, site: Site, words: Words) -> None:
        self.site = site
        self.words = words
        # Fixed, so that a draft outlives a restart of the server; it hides nothing from the browser that holds it.
        self.kept = gr.BrowserState({"text": "", "source": ""}, storage_key=STORAGE_KEY, secret="tunekit")
        self.text = gr.Code(
            label=words("form.yaml"),
            language="yaml",
            interactive=True,
            lines=8,
            max_lines=20,
            elem_id="form-yaml",
            wrap_lines=True,
            render=False,
        )
        hidden: dict[str, Any] = {"visible": "hidden", "label": words("form.yaml"), "render": False}
        self.known = gr.Textbox(elem_id="form-known", **hidden)
        self.faults = gr.Textbox(elem_id="form-faults", **hidden)
        self.tick = gr.Textbox(elem_id="form-tick", **hidden)
        # What is looked for in the form that is made: what stands in the field once all edits are in the draft.
        self.sought = gr.Textbox("", elem_id="form-sought", **hidden)
        self.form = [self.tick, self.sought]
        gr.Markdown(f"# {words('form.title')}")
        if site.read_only:
            gr.HTML(f"<p role='note'>{escape(words('form.read_only'))}</p>", elem_id="form-read-only")
        with gr.Row(elem_id="form-presets"):
            self._presets()
        self.notice = gr.HTML(elem_id="form-notice")
        with gr.Row(elem_id="form-columns"):
            with gr.Column(scale=3, min_width=320) as self.main:
                self.search = gr.Textbox(
                    label=words("form.search"),
                    placeholder=words("form.search_info"),
                    elem_id="form-search",
                    max_lines=1,
                )
                self._hub()
                make_lock(words)
                with gr.Column(elem_id=FIELDS):
                    self._render()
            with gr.Column(scale=2, min_width=320, elem_id="form-side"):
                self._side()

    def _presets(self) -> None:
        """Lay out what a draft starts from: shipped recipes by task and machine, files and runs."""
        words = self.words
        recipes = tunekit.list_recipes()
        methods = dict.fromkeys(shipped.method for shipped in recipes)
        tasks = [(words("form.any"), ""), *((words(f"form.task_{method}"), method) for method in methods)]
        needed = sorted({shipped.gpu_gb for shipped in recipes if shipped.gpu_gb is not None})
        sizes = [(words("form.any"), ""), *((f"{size} GB" if size else "CPU", str(size)) for size in needed)]
        small: dict[str, Any] = {"interactive": True, "min_width": 160, "scale": 1}
        self.task = gr.Dropdown(tasks, value="", label=words("form.task"), elem_id="form-task", **small)
        self.size = gr.Dropdown(sizes, value="", label=words("form.size"), elem_id="form-size", **small)
        self.source = gr.Dropdown(
            [],
            label=words("form.start_from"),
            info=words("form.start_from_info"),
            elem_id="form-source",
            interactive=True,
            allow_custom_value=True,
            min_width=320,
            scale=3,
        )

    def _hub(self) -> None:
        """Lay out the search for a model on the hub, which a server that only shows does not contact."""
        words = self.words
        with gr.Accordion(words("form.hub"), open=False, visible=not self.site.read_only, elem_id="form-hub"):
            with gr.Row():
                self.hub_text = gr.Textbox(
                    label=words("form.hub_text"), placeholder="Qwen3 0.6B", max_lines=1, max_length=100, scale=3,
                    min_width=200, elem_id="form-hub-text",
                )  # fmt: skip
                self.hub_search = gr.Button(words("form.hub_search"), min_width=120, elem_id="form-hub-search")
            self.hub_models = gr.Dropdown(
                [], label=words("form.hub_models"), info=words("form.hub_models_info"), visible=False,
                allow_custom_value=True, interactive=True, elem_id="form-hub-models",
            )  # fmt: skip
            self.hub_answer = gr.HTML(elem_id="form-hub-answer", padding=False)

    def _side(self) -> None:
        """Lay out what stands beside the form."""
        words = self.words
        self.problems = gr.HTML(elem_id="form-problems")
        self.launch = plan_panel.make_launch(words, read_only=self.site.read_only)
        sweep_panel.build(self.site, words, self.text)
        for component in (self.text, self.known, self.faults, *self.form):
            component.render()
        with gr.Accordion(words("form.differences"), open=False):
            self.differences = gr.HTML(elem_id="form-differences")
        with gr.Accordion(words("form.same_elsewhere"), open=self.site.read_only, elem_id="form-elsewhere"):
            shell: dict[str, Any] = {"interactive": False, "wrap_lines": True, "buttons": ["copy"]}
            self.command = gr.Code(
                label=words("form.command"), language="shell", lines=1, elem_id="form-command", **shell
            )
            self.python = gr.Code(
                label=words("form.python"), language="python", lines=3, elem_id="form-python", **shell
            )
        with gr.Row(elem_id="form-save-row", visible=not self.site.read_only):
            self.file = gr.Textbox("mine.yaml", label=words("form.file"), max_lines=1, elem_id="form-file", scale=2)
            self.save = gr.Button(words("form.save"), elem_id="form-save")
            self.replace = gr.Button(words("form.replace"), visible=False, elem_id="form-replace")
        self.saved = gr.HTML(elem_id="form-saved")

    def attach(self, page: gr.Blocks) -> None:
        """Attach what happens between the components."""
        drafted = [self.text, self.known, self.tick, self.source, self.notice]
        opened = page.load(self.open, [self.kept], drafted, show_progress="hidden")
        opened.then(fn=None, js=_FORGET_QUERY)
        self._done(opened)
        chosen = self.source.input(None, None, None, js=ACT)
        self._done(chosen.then(self.begin, [self.source], drafted, show_progress="hidden", trigger_mode="always_last"))
        narrowing = [self.task.input, self.size.input]
        gr.on(narrowing, self.narrow, [self.task, self.size, self.source], [self.source], show_progress="hidden")
        script = "async (asked) => { await formLock.settled(); return asked; }"
        self.search.change(None, self.search, self.sought, js=script)
        checked = [self.problems, self.faults, self.differences, self.command, self.python]
        # The text may come before its source, which decides the command.
        changes = [self.text.change, self.source.change, self.file.change]
        attach_in_order(changes, self.check, [self.text, self.source, self.file], checked)
        self.text.change(None, [self.text, self.source, self.kept], [self.kept], js=_KEEP)
        saving: dict[str, Any] = {
            "inputs": [self.file, self.text],
            "outputs": [self.saved, self.replace],
            "show_progress": "hidden",
        }
        if self.site.read_only:
            return
        searching = [self.hub_text.submit, self.hub_search.click]
        gr.on(searching, self.find_models, [self.hub_text], [self.hub_models, self.hub_answer])
        chosen = self.hub_models.input(None, None, None, js=ACT)
        edited = [self.text, self.known, self.tick]
        self._done(chosen.then(partial(self.edit, key="model.path"), [self.text, self.hub_models], edited, **_QUIET))
        self.save.click(None, None, None, js=SETTLED).then(self.write, **saving)
        self.replace.click(None, None, None, js=SETTLED).then(self.overwrite, **saving)
        self.file.input(lambda: gr.update(visible=False), None, [self.replace], show_progress="hidden")

    def _render(self) -> None:
        """Make the form anew where the draft has other fields, and not where it has other values."""
        changes = [component.change for component in self.form]
        gr.on(changes, None, self.form, None, js=WANT)
        gr.render([self.known, *self.form], changes, show_progress="hidden")(self.fill)

    def _done(self, acted: Any, **options: Any) -> None:
        """After what changes the draft as a whole, have the form wait for no more than what that has asked for."""
        acted.then(None, self.form, None, js=DONE, **{name: f"{key}-done" for name, key in options.items()})
        acted.failure(None, self.form, None, js=DONE, **{name: f"{key}-failed" for name, key in options.items()})

    def fill(self, known: str, tick: str, asked: str) -> None:
        """Make the form of a draft, and attach its events."""
        try:
            entries = draft.entries_of(known)
        except tunekit.TunekitError as error:
            gr.HTML(told(error))
            make_mark([tick, asked], [])
            return
        faults = faults_by_entry(entries, draft.check_draft(known)[1])
        form = make_form(entries, faults, self.words, asked)
        keys, fields = list(form.fields), list(form.fields.values())
        folds = [fold for fold, _ in form.folds]
        # The draft as this very form shows it: fields that come into the page behind somebody's next change say what
        # was there before it, and that is no wish to have it back.
        held_draft = gr.Textbox(known, visible="hidden", label=self.words("form.yaml"), elem_id="form-held")

        def changed(text: str, shown_here: str, *given: Any) -> list[Any]:
            return self.merge(text, shown_here, dict(zip(keys, given, strict=True)))

        def settled(found: str, shown_here: str, text: str) -> list[Any]:
            if json.loads(found)["text"] != text:  # It has changed since, and what is found in it now comes next.
                return [gr.skip()] * (len(keys) + len(folds) + 3)
            return self.follow(found, shown_here, keys, [inside for _, inside in form.folds])

        tags = [place for place, key in enumerate(keys) if key in {entry.key for entry in entries if entry.is_tag}]
        if fields:
            # `input` comes with keys only, and not with what is pasted.
            changes = [field.change for field in fields]
            gr.on(changes, None, None, None, js=EDIT, key="edited")
            inputs = [self.text, held_draft, *fields]
            merged = gr.on(
                changes,
                changed,
                inputs,
                [self.text, held_draft, self.known, self.tick],
                js=send([place + inputs.index(fields[0]) for place in tags]),
                key="changed",
                **_QUIET,
            )
            merged.then(None, self.form, None, js=MERGED, key="merged")
            merged.failure(None, self.form, None, js=MERGED, key="not-merged")
            # What the form is held against comes last: until then, each field shows what was there or what is now.
            told_of = [*fields, *folds, held_draft, self.known, self.tick]
            self.faults.change(settled, [self.faults, held_draft, self.text], told_of, key="settled", **_QUIET)
        self._attach_lists(form)
        make_mark([tick, asked], [fields[place].value for place in tags])

    def _attach_lists(self, form: Form) -> None:
        """Attach what adds sections to lists and removes them."""
        for button, key in form.removes:
            self._attach_edit(button.click, f"remove-{key}", partial(self.edit, key=key, value=frontend.UNSET))
        for add, entry in form.adds:
            if isinstance(add, gr.Button):
                self._attach_edit(add.click, f"add-{entry.key}", partial(self.add, entry=entry, tag=None))
            else:
                self._attach_edit(add.input, f"add-{entry.key}", partial(self._add_chosen, entry), add)

    def _attach_edit(self, listen: Any, key: str, edit: Any, *inputs: gr.Component) -> None:
        """Have an event change which sections a draft has."""
        acting = listen(None, None, None, js=ACT, key=f"{key}-acts")
        edited = [self.text, self.known, self.tick]
        self._done(acting.then(edit, [self.text, *inputs], edited, key=key, **_QUIET), key=key)

    def _add_chosen(self, entry: frontend.Entry, text: str, tag: str) -> list[Any]:
        return self.add(text, entry, tag)

    # What the handlers do

    def open(self, kept: dict[str, str] | None, request: gr.Request) -> list[Any]:
        """The draft that the page's URL asks for, or else the browser's own, or else a first one."""
        query = request.query_params
        kept = kept or {}
        offered = gr.update(choices=self.choices())
        notice = ""
        if query.get("from"):
            drafted = self.begin(query["from"], query.getlist("set"))
            notice = drafted[4]
        if not query.get("from") or notice:
            text = kept.get("text")
            drafted = [text, text, _now(), kept.get("source", ""), ""] if text else self.begin(draft.FIRST)
        offered["value"] = drafted[3]
        return [*drafted[:3], offered, notice]

    def choices(self) -> list[tuple[str, str]]:
        """Return the sources of a draft."""
        source_lists = draft.sources(self.site)
        return [
            (f"{self.words(f'form.from_{kind}')} {label}", value)
            for kind in source_lists
            for label, value in source_lists[kind]
        ]

    def narrow(self, task: str, size: str, source: str | None) -> Any:
        """Offer the shipped recipes of a task that fit on a GPU, or all sources; the current one stays."""
        every = self.choices()
        if not task and not size:
            return gr.update(choices=every, info=self.words("form.start_from_info"))
        offered = draft.recipes(task, int(size) if size else None)
        current = [choice for choice in every if choice[1] == source and choice[1] not in {name for _, name in offered}]
        return gr.update(choices=[*current, *offered], info=self.words("form.matching", number=len(offered)))

    def begin(self, source: str, changes: list[str] | None = None) -> list[Any]:
        """A draft from something; where that cannot be, what is there stays, and a message says why."""
        try:
            text = draft.opened(self.site, source, changes or [])
        except tunekit.TunekitError as error:
            return [gr.skip(), gr.skip(), gr.skip(), gr.skip(), told(error)]
        return [text, text, _now(), source, ""]

    def merge(self, text: str, known: str, given: dict[str, Any]) -> list[Any]:
        """The draft with what was changed in the form; the form is made anew where it is another one now."""
        try:
            new = draft.merged(text, known, given)
            before, now = draft.entries_of(known), draft.entries_of(new)
        except tunekit.TunekitError:
            gr.Warning(self.words("form.mend_yaml"))
            return [gr.skip(), gr.skip(), gr.skip(), gr.skip()]
        is_other = draft.keys_of(before) != draft.keys_of(now) or text.strip() != known.strip()
        return [gr.skip() if new == text else new, new, new, _now() if is_other else gr.skip()]

    def follow(self, found: str, known: str, keys: list[str], folds: list[list[str]]) -> list[Any]:
        """Return the form of a draft that was checked: its values and their problems.

        Args:
            found: The draft and its faults, as `check` wrote them.
            known: The draft that the form shows.
            keys: The fields of the form.
            folds: The fields in each part that can be folded.
        """
        checked = json.loads(found)
        nothing = [gr.skip()] * (len(keys) + len(folds))
        try:
            before, now = draft.entries_of(known), draft.entries_of(checked["text"])
        except tunekit.TunekitError:
            return [*nothing, gr.skip(), gr.skip(), gr.skip()]
        if draft.keys_of(before) != draft.keys_of(now):
            return [*nothing, gr.skip(), checked["text"], _now()]
        faults = faults_by_entry(now, [frontend.Fault(**fault_found) for fault_found in checked["faults"]])
        was = {entry.key: shown(entry) for entry in before}
        updates = {}
        for entry in now:
            value = {} if shown(entry) == was[entry.key] else {"value": shown(entry)}
            fault = faults.get(entry.key)
            updates[entry.key] = gr.update(
                info=info_of(entry, self.words, fault), elem_classes=classes_of(fault), **value
            )
        opened = [gr.update(open=True) if any(key in faults for key in inside) else gr.skip() for inside in folds]
        return [*(updates[key] for key in keys), *opened, checked["text"], checked["text"], gr.skip()]

    def find_models(self, text: str) -> list[Any]:
        """Offer models of the hub by a part of their names; where there are none, say why."""
        try:
            models = search_models(text)
        except tunekit.TunekitError as error:
            return [gr.update(visible=False), told(error)]
        if not models:
            return [gr.update(visible=False), f"<p role='status'>{escape(self.words('form.hub_none', text=text))}</p>"]
        offered = [
            (self.words("form.hub_model", name=model.name, number=f"{model.downloads:,}"), model.name)
            for model in models
        ]
        return [gr.update(choices=offered, value=None, visible=True), ""]

    def edit(self, text: str, value: Any, key: str) -> list[Any]:
        """The draft with one key changed, and a form of its own."""
        try:
            new = frontend.edit_text(text, key, value)
        except tunekit.TunekitError:
            gr.Warning(self.words("form.mend_yaml"))
            return [gr.skip(), gr.skip(), gr.skip()]
        return [new, new, _now()]

    def add(self, text: str, entry: frontend.Entry, tag: str | None) -> list[Any]:
        """The draft with one more section in a list."""
        if tag == "":
            return [gr.skip(), gr.skip(), gr.skip()]
        item = {"path": ""} if tag is None else {"type": tag}
        is_first = tag is None and not entry.num_items
        return self.edit(text, item, entry.key if is_first else f"{entry.key}[{entry.num_items or 0}]")

    def check(self, text: str, source: str, file: str) -> list[Any]:
        """Return the problems of a draft, its differences from the defaults, and how to train it elsewhere."""
        _, faults = draft.check_draft(text)
        payload = json.dumps({"text": text, "faults": [vars(fault) for fault in faults]})
        try:
            command, python = draft.command_and_python(source or "", text, file or "mine.yaml")
            differences = self.table(text)
        except tunekit.TunekitError:
            command = python = differences = ""
        return [self.problem_list(faults), payload, differences, command, python]

    def problem_list(self, faults: list[frontend.Fault]) -> str:
        """Render problems, each with its line."""
        if not faults:
            return f"<p class='form-valid' role='status'>✓ {escape(self.words('form.valid'))}</p>"
        lines = "".join(
            f"<li><span class='form-line'>{escape(self.words('form.line', line=fault.line))}</span> "
            f"{f'<code>{escape(fault.key)}</code>: ' if fault.key else ''}{escape(fault.message)}</li>"
            for fault in faults
        )
        title = escape(self.words("form.problems", number=len(faults)))
        return f"<div class='form-problems' role='alert'><p>{title}</p><ul>{lines}</ul></div>"

    def table(self, text: str) -> str:
        """The fields that differ from their defaults."""
        rows = "".join(
            f"<tr><th scope='row'><code>{escape(difference.key)}</code></th>"
            f"<td>{escape(_word(difference.default))}</td>"
            f"<td>{escape(_word(difference.value))}</td></tr>"
            for difference in draft.differences(text)
        )
        heads = "".join(f"<th scope='col'>{escape(self.words(f'form.{name}'))}</th>" for name in ("key", "was", "is"))
        return f"<div class='form-scroll'><table class='form-table'><thead><tr>{heads}</tr></thead>{rows}</table></div>"

    def write(self, name: str, text: str, replace: bool = False) -> list[Any]:
        """Save the draft in the workspace; where a file is there, ask first."""
        try:
            path = draft.save(self.site, name, text, replace=replace)
        except FileExistsError:
            question = f"<p role='alert'>{escape(self.words('form.exists', file=name))}</p>"
            return [question, gr.update(visible=True)]
        except tunekit.TunekitError as error:
            return [told(error), gr.update(visible=False)]
        where = path.relative_to(self.site.root.resolve()).as_posix()
        return [f"<p role='status'>✓ {escape(self.words('form.saved', file=where))}</p>", gr.update(visible=False)]

    def overwrite(self, name: str, text: str) -> list[Any]:
        """Save the draft in the place of the file that is there."""
        return self.write(name, text, replace=True)


def _now() -> str:
    """Return a unique value for this tick: the form is made anew."""
    return str(time.time_ns())


def _word(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def build(page: gr.Blocks, site: Site, words: Words) -> None:
    """The page."""
    parts = NewRun(site, words)
    parts.attach(page)
    # Below the form and not below both columns, so that what starts the run stays in sight beside the plan too.
    with parts.main:
        plan_panel.build(page, site, words, parts.text, parts.launch, [parts.known, parts.tick], parts.form)
