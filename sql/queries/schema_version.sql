-- Purpose: the number of the newest migration that was applied.
-- Parameters: none.
-- Index: none; the table has a row a migration.
-- Trap: null where the table is there and no migration was applied.
SELECT max(number) AS number FROM {schema}.awa_migrations
