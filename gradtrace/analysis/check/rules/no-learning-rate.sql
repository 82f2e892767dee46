-- no-learning-rate: The learning rate is zero
-- severity: warning
-- meaning: The learning rate of every group has been zero for many steps: forward and backward are computed for
--   nothing. A schedule that has come to its end, or whose warm-up never begins, does this.
-- mend: Make the schedule as long as the run; call scheduler.step() as often as the schedule counts.
-- value: number of steps with a learning rate of zero
-- looks at: the learning rate just before each update, the largest of all groups, in full and in watched steps
-- needs: steps
-- threshold steps = 10 steps: on end, skipped steps among them
-- source steps: our choice: a warm-up may start at zero
WITH numbered AS (
    SELECT rank, step, lr, row_number() OVER (PARTITION BY rank ORDER BY step) AS number
    FROM course
    WHERE lr IS NOT NULL
),
zeros AS (
    SELECT *, number - row_number() OVER (PARTITION BY rank ORDER BY step) AS island FROM numbered WHERE lr = 0
)
SELECT
    rank, NULL AS module, 'lr' AS tensor, NULL AS path, min(step) AS since, max(step) AS step,
    count(*)::DOUBLE AS value, $steps::DOUBLE AS threshold, format('up to step {}', max(step)) AS note
FROM zeros
GROUP BY rank, island
HAVING count(*) >= $steps
