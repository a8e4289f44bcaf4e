// Each chart has a menu, which the keyboard reaches: its values as a table, and the chart as PNG and CSV.
// They are read from the marks in the page: Vega binds each to the row that it is drawn from, and to its tooltip.
{
  const WORDS = CHART_WORDS;

  const titleOf = (chart) => chart.querySelector(".vega-embed").getAttribute("aria-label").split(":")[0];

  const tableOf = (chart) =>
    [...chart.querySelectorAll("[role=graphics-symbol]")].map((mark) => mark.__data__?.tooltip)
      .filter((tooltip) => tooltip && typeof tooltip === "object");

  // All points of curves, of which the table has those that the pointer tells apart.
  const rowsOf = (chart) => {
    const table = tableOf(chart);
    const points = [...chart.querySelectorAll(".mark-line path")]
      .flatMap((line) => line.__data__.mark.items.map((item) => item.datum)).filter((row) => "k" in row);
    if (!points.length) return table;
    // Behind a smoothed curve are the values as they were logged.
    const smoothed = new Set(points.filter((row) => row.k === "faint").map((row) => row.g));
    const [place] = Object.keys(table[0]);
    return points.filter((row) => row.k !== "plain" || !smoothed.has(row.g))
      .map((row) => ({ [WORDS.curve]: row.t, [place]: row.x, [titleOf(chart)]: row.y }));
  };

  const save = (chart, blob, suffix) => {
    const run = new URLSearchParams(location.search).get("run");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = [run, titleOf(chart)].filter(Boolean).join("-").replace(/[^\p{L}\p{N}_.-]+/gu, "-") + suffix;
    link.click();
    URL.revokeObjectURL(link.href);
  };

  const saveCsv = (chart) => {
    const rows = rowsOf(chart), heads = Object.keys(rows[0] ?? {});
    const cell = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
    const lines = [heads, ...rows.map((row) => heads.map((head) => row[head]))].map((line) => line.map(cell).join(","));
    save(chart, new Blob([lines.join("\n") + "\n"], { type: "text/csv" }), ".csv");
  };

  const savePng = async (chart) => {
    const svg = chart.querySelector("svg.marks"), style = getComputedStyle(svg);
    const copy = svg.cloneNode(true);
    copy.style.fontFamily = style.fontFamily;
    // A picture of its own has no style sheet of the page.
    const text = new XMLSerializer().serializeToString(copy)
      .replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    const image = new Image();
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 2 * image.width;
    canvas.height = 2 * image.height;
    const context = canvas.getContext("2d");
    context.fillStyle = style.getPropertyValue("--body-background-fill").trim();
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(chart, blob, ".png"));
  };

  const add = (parent, tag, text, attributes = {}) => {
    const element = parent.appendChild(document.createElement(tag));
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  const showTable = (chart) => {
    const rows = tableOf(chart), title = titleOf(chart);
    const dialog = add(chart.closest(".gradio-container"), "dialog", "", { class: "chart-table", "aria-label": title });
    add(dialog, "h2", title);
    const table = add(add(dialog, "div", "", { tabindex: 0 }), "table", "", { class: "runs-table" });
    const heads = add(add(table, "thead", ""), "tr", ""), body = add(table, "tbody", "");
    for (const head of Object.keys(rows[0] ?? {})) add(heads, "th", head, { scope: "col" });
    for (const row of rows) {
      const line = add(body, "tr", "");
      for (const [head, value] of Object.entries(row)) add(line, "td", value, { "data-label": head });
    }
    add(dialog, "button", WORDS.close, { class: "shell-button" }).onclick = () => dialog.close();
    dialog.onclose = () => dialog.remove();
    dialog.showModal();
  };

  const addMenu = (chart) => {
    const menu = add(chart, "details", "", { class: "chart-menu" });
    const opener = add(menu, "summary", "⋯");
    const actions = { table: showTable, png: savePng, csv: saveCsv };
    for (const [name, act] of Object.entries(actions))
      add(menu, "button", WORDS[name], { type: "button" }).onclick = () => {
        menu.open = false;
        opener.focus();
        act(chart);
      };
    menu.onkeydown = (event) => {
      if (event.key === "Escape" && menu.open) {
        menu.open = false;
        opener.focus();
      }
    };
    menu.onfocusout = (event) => {
      if (!menu.contains(event.relatedTarget)) menu.open = false;
    };
    return menu;
  };

  // A chart that changes places takes its name along.
  new MutationObserver(() => {
    for (const chart of document.querySelectorAll(".runs-chart:has(.vega-embed[aria-label] svg.marks)")) {
      const menu = chart.querySelector(":scope > .chart-menu") ?? addMenu(chart);
      const label = `${titleOf(chart)}: ${WORDS.menu}`;
      if (menu.firstChild.ariaLabel !== label) menu.firstChild.ariaLabel = label;
    }
  }).observe(document.documentElement, { childList: true, subtree: true });
}
