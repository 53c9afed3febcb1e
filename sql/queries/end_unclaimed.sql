-- Purpose: claim and end in one transaction.
-- Parameters: attempt (jsonb), envelope (bytea or null), transition (jsonb).
-- Index: those of claim.sql and end_attempt.sql.
-- Trap: the attempt's token makes it repeatable; never send it with a new one.
SELECT answer, id, run_lease, run_token
FROM {schema}.end_unclaimed(%(attempt)s::jsonb, %(envelope)s::bytea, %(transition)s::jsonb)
