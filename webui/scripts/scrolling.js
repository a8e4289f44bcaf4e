// What scrolls is reached by the keyboard, and what does not scroll is no stop of the Tab key.
{
  const BOXES = ".runs-wide, .compare-wide, .data-scroll, .form-scroll, .data-source, .data-fields dd, .runs-answer, pre, "
    + ".data-bad ul, .runs-warnings ul, .runs-restarts ul, #log-lines > *, .cm-scroller, #controls-effects";
  let isWaiting = false;
  const mark = () => {
    isWaiting = false;
    const boxes = [...document.querySelectorAll(BOXES)];
    const scrolls = boxes.map((box) => box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight);
    boxes.forEach((box, place) => (scrolls[place] ? box.setAttribute("tabindex", 0) : box.removeAttribute("tabindex")));
  };
  const later = () => {
    if (!isWaiting) setTimeout(mark, 300);
    isWaiting = true;
  };
  new MutationObserver(later).observe(document.documentElement, { childList: true, subtree: true });
  addEventListener("resize", later);
  // What was hidden is measured when it is shown.
  for (const event of ["click", "keyup"]) addEventListener(event, later);
}
