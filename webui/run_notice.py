"""A notification of the browser when a run ends, for visitors who wait for it in another tab.

The browser does it by itself, from what the page shows. It is offered while a run is live, where the browser can: it
shows notifications of pages of this machine and of those that come through HTTPS.
"""

from html import escape

import gradio as gr

from webui.listing import FINAL
from webui.words import Words

_CODE = """
const box = element.querySelector("input"), blocked = element.querySelector("[role=status]");
const head = document.getElementById("runs-head");
let live = null;  // the name of the run that the page showed last, if that was live
function look() {
  const state = head.querySelector(".runs-state"), name = head.querySelector("h1")?.textContent;
  const over = !state || FINAL.some((kind) => state.classList.contains(`runs-${kind}`));
  element.classList.toggle("runs-notice-offered", !over && "Notification" in window);
  if (over && state && live === name && box.checked) {
    new Notification(`${name}: ${state.textContent.trim()}`);
    box.checked = false;
  }
  live = over ? null : name;
}
box.addEventListener("change", async () => {
  if (!box.checked || (await Notification.requestPermission()) === "granted") return;
  box.checked = false;
  blocked.hidden = false;
});
new MutationObserver(look).observe(head, { childList: true, subtree: true });
look();
""".replace("FINAL", str(list(FINAL)))


def build(words: Words) -> None:
    """The tick box, below the head of a run."""
    label = escape(words("runs.notify"))
    blocked = escape(words("runs.notify_blocked"))
    gr.HTML(
        f"<label><input type='checkbox'> {label}</label> <span role='status' hidden>{blocked}</span>",
        js_on_load=_CODE,
        elem_id="runs-notice",
        padding=False,
    )
