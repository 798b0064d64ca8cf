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
})();
