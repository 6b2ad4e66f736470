// Sorts a table by the column whose head is pressed, and shows the rows that hold every word typed.
for (const box of document.querySelectorAll('[data-table]')) {
  const table = document.getElementById(box.dataset.table);
  const body = table.tBodies[0];
  const words = box.querySelector('input');
  const status = box.querySelector('select');
  const count = box.querySelector('output');

  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      const fits = wanted.every((word) => text.includes(word)) &&
        (!status.value || row.dataset.status.split(' ').includes(status.value));
      row.classList.toggle('hidden', !fits);
      shown += fits;
    }
    count.textContent = `${shown} of ${body.rows.length}`;
  };

  const sort = (head) => {
    const up = head.getAttribute('aria-sort') !== 'ascending';
    for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const key = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === '' || y === '') return (x === '') - (y === '');  // what is not known stays last
      const [m, n] = [Number(x), Number(y)];
      const order = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
      return up ? order : -order;
    });
    body.append(...rows);
  };

  words.addEventListener('input', filter);
  status.addEventListener('change', filter);
  for (const head of table.tHead.rows[0].cells) {
    head.querySelector('button').addEventListener('click', () => sort(head));
  }
  filter();
}
// A link to a trial opens it.
const open = () => {
  const found = location.hash && document.getElementById(location.hash.slice(1));
  if (found && found.tagName === 'DETAILS') found.open = true;
};
addEventListener('hashchange', open);
open();
