(() => {
  const dialog = document.querySelector("dialog"), stage = dialog.querySelector(".stage");
  const words = dialog.querySelector("p");
  let shots = [], at = 0;
  const show = () => {
    const shot = shots[at], video = shot.href.endsWith(".mp4");
    const view = document.createElement(video ? "video" : "img");
    if (video) Object.assign(view, { controls: true, autoplay: true, loop: true, muted: true });
    view.src = shot.href;
    view.className = shot.querySelector("img.px") ? "px" : "";
    stage.replaceChildren(view);
    words.textContent = shot.title;
  };
  const move = by => { at = (at + by + shots.length) % shots.length; show(); };
  document.addEventListener("click", event => {
    const shot = event.target.closest("a.shot");
    if (!shot || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    shots = [...(shot.closest("section, details") || document).querySelectorAll("a.shot")];
    at = shots.indexOf(shot);
    show();
    dialog.showModal();
  });
  dialog.addEventListener("click", event => {
    const by = event.target.dataset.move;
    if (by) move(Number(by)); else if (event.target === dialog) dialog.close();
  });
  dialog.addEventListener("close", () => stage.replaceChildren());
  dialog.addEventListener("keydown", event => {
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
  const open = () => {
    const found = location.hash && document.getElementById(location.hash.slice(1));
    if (found && found.tagName === "DETAILS") found.open = true;
  };
  addEventListener("hashchange", open);
  open();
  // Captures of the whole page show no picture that waits to be scrolled to.
  for (const image of document.querySelectorAll("img[loading]"))
    if (!image.closest("details:not([open])")) image.loading = "eager";
  // A click on the name of a column sorts its table, and another one the other way.
  const value = (row, at) => {
    const text = row.cells[at].textContent.trim(), number = parseFloat(text.replace(/,/g, "").replace("\u2212", "-"));
    return Number.isNaN(number) ? text : number;
  };
  const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  for (const head of document.querySelectorAll("thead th")) {
    head.classList.add("sortable");
    head.addEventListener("click", () => {
      const body = head.closest("table").tBodies[0], at = head.cellIndex;
      const falls = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => order(value(a, at), value(b, at)) * (falls ? -1 : 1));
      body.append(...rows);
    });
  }
  // The page of a run at work is written again after each iteration.
  // A reader who has sorted, opened or enlarged something keeps it.
  let touched = false;
  document.addEventListener("click", event => { touched ||= event.target.closest("th, summary, a.shot") !== null; });
  if (document.querySelector(".state.running"))
    setInterval(() => { if (!touched) location.reload(); }, 30000);
})();
