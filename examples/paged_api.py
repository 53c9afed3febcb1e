"""Copy what an API gives in pages, and go on at the same page after it was out of order.

Needs no service: the API is a thread of this program, PostgreSQL is embedded, the messages are
files, the worker is started here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.request import urlopen

import psycopg
from celery import Celery

import celery_awa
from celery_awa import AwaTask
from celery_awa.resume import Pages
from example_worker import example
from example_worker.server import started_server
from example_worker.settings import SETTINGS
from example_worker.worker import Worker

PAGES, ORDERS_A_PAGE = 20, 25
URL = started_server()

app = Celery("paged_api")
app.conf.update(SETTINGS)
celery_awa.install(app, database_url=URL)


@app.task(base=AwaTask, bind=True, autoretry_for=(OSError,), retry_kwargs={"countdown": 0.3})
def copy_orders(self: AwaTask, api: str) -> None:
    """Copy all orders. One that is copied twice is the same row, so a retry may do it again."""

    def fetch(token: str | None) -> tuple[list[dict[str, Any]], str | None]:
        with urlopen(f"{api}/orders?page={token or ''}", timeout=10) as answer:
            page = json.load(answer)
        return page["orders"], page["next"]

    with psycopg.connect(URL, autocommit=True) as database:
        for order in self.iterate(Pages(fetch), message="order {0[id]}".format):
            database.execute(
                "INSERT INTO orders (id, amount) VALUES (%(id)s, %(amount)s) ON CONFLICT (id)"
                " DO UPDATE SET amount = excluded.amount, writes = orders.writes + 1",
                order,
            )
            time.sleep(0.002)  # heavier work


class Api(BaseHTTPRequestHandler):
    """Pages of orders, by tokens that mean nothing to others. Half of the way it fails once."""

    asked: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        token = self.path.partition("?page=")[2]
        number = int(token.removeprefix("p") or 0)
        self.asked.append(number)
        broken = number == PAGES // 2 and self.asked.count(number) == 1
        first = number * ORDERS_A_PAGE
        page = {
            "orders": [{"id": n, "amount": 3 * n} for n in range(first, first + ORDERS_A_PAGE)],
            "next": f"p{number + 1}" if number + 1 < PAGES else None,
        }
        self.send_response(503 if broken else 200)
        self.end_headers()
        self.wfile.write(b"out of order" if broken else json.dumps(page).encode())

    def log_message(self, *_: Any) -> None:
        pass


def play(worker: Worker) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with psycopg.connect(URL, autocommit=True) as database, celery_awa.Client(app) as client:
        database.execute(
            "CREATE TABLE orders (id integer PRIMARY KEY, amount integer, writes integer DEFAULT 1)"
        )
        sent = copy_orders.delay(f"http://127.0.0.1:{server.server_port}")
        job = example.wait_for_end(client, sent.id)
        found = database.execute("SELECT id, amount, writes FROM orders ORDER BY id").fetchall()
    if (job.state, job.attempt, job.retries) != ("completed", 2, 1):
        yield f"the job is {job.state} in attempt {job.attempt}: {job.errors}"
    # An exception loses nothing: what was finished is not done again.
    if found != [(n, 3 * n, 1) for n in range(PAGES * ORDERS_A_PAGE)]:
        yield f"the {len(found)} rows are not the orders of the API, each written once"
    # The page on which the cursor lies is fetched again, and the one that failed.
    if len(Api.asked) > PAGES + 2:
        yield f"the pages {Api.asked} were fetched, of {PAGES}"
    print(f"{len(found)} orders copied by {len(Api.asked)} requests for {PAGES} pages")


if __name__ == "__main__":
    example.main("paged_api", play)
