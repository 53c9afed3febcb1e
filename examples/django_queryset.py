"""Change all objects of a model, each exactly once, though the worker is restarted on the way.

Needs no service and no project: Django is configured here, PostgreSQL is embedded, the messages are
files, the worker is started here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import django
from celery import Celery
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

import celery_awa
from celery_awa.resume import QuerysetRows
from example_worker import example
from example_worker.server import started_server
from example_worker.settings import SETTINGS
from example_worker.worker import Worker

ARTICLES, BATCH = 1_000, 20
URL = started_server()

# What a project has in its settings module. The tables of celery-awa are in the same database.
address = conninfo_to_dict(URL)
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": address.pop("dbname"),
            "OPTIONS": address,
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

from django.db import connection, models, transaction  # noqa: E402  # Django is set up first

from celery_awa.django import AwaTask  # noqa: E402


class Article(models.Model):
    price = models.IntegerField()

    class Meta:
        app_label = "shop"


app = Celery("django_queryset")
app.conf.update(SETTINGS)
celery_awa.install(app, database_url=URL)


@app.task(base=AwaTask, bind=True, acks_late=True)
def double_prices(self: AwaTask) -> None:
    """What must not be done twice to an article."""
    articles = self.iterate(QuerysetRows(Article.objects.all(), page_size=200), batch_size=BATCH)
    for batch in articles:
        with transaction.atomic():
            for article in batch:
                article.price *= 2
            Article.objects.bulk_update(batch, ["price"])
            articles.checkpoint_in(connection)  # commits with the prices, or not at all
        time.sleep(0.04)  # heavier work


def play(worker: Worker) -> Iterator[str]:
    with connection.schema_editor() as editor:
        editor.create_model(Article)
    Article.objects.bulk_create(Article(price=number) for number in range(ARTICLES))
    with celery_awa.Client(app) as client:
        sent = double_prices.delay()
        example.wait_for_percent(client, sent.id, 30)
        print("the worker is restarted, as by a deploy")
        worker.restart()
        job = example.wait_for_end(client, sent.id)
    # A worker that is stopping may get it back once or twice until it takes no more.
    if job.state != "completed" or job.run_lease < 2:
        yield f"the job is {job.state} after {job.run_lease} executions: {job.errors}"
    # Neither a failure nor a retry nor a rescue.
    if (job.attempt, job.retries, job.rescues, job.errors) != (1, 0, 0, ()):
        yield f"attempt {job.attempt}, {job.retries} retries, {job.rescues} rescues: {job.errors}"
    prices = list(Article.objects.order_by("pk").values_list("price", flat=True))
    wrong = sum(price != 2 * number for number, price in enumerate(prices))
    print(f"{len(prices)} articles, {wrong} with another price than twice the first")
    if wrong or len(prices) != ARTICLES:
        yield f"{wrong} prices of {len(prices)} are wrong, of {ARTICLES} articles"


if __name__ == "__main__":
    example.main("django_queryset", play)
