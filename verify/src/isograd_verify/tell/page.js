const tip = document.getElementById('tip');
let shown = null;
document.addEventListener('mouseover', event => {
  if (shown) { shown.owner.prepend(shown.title); shown = null; tip.hidden = true; }
  const title = event.target.querySelector(':scope > title');
  if (!title || event.target.namespaceURI === document.documentElement.namespaceURI) return;
  shown = { owner: event.target, title };
  title.remove();  // or the browser shows it a second time, later
  tip.textContent = title.textContent;
  tip.hidden = false;
  const size = tip.getBoundingClientRect(), box = event.target.getBoundingClientRect();
  const below = Math.min(box.bottom, innerHeight) + 6;
  tip.style.left = Math.max(4, Math.min(event.clientX, innerWidth - size.width - 8)) + 'px';
  tip.style.top = (below + size.height < innerHeight ? below : Math.max(4, box.top - size.height - 6)) + 'px';
});
const unfold = () => { const named = document.getElementById(location.hash.slice(1)); if (named) named.open = true; };
addEventListener('hashchange', unfold);
unfold();
