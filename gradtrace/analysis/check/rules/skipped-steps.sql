-- skipped-steps: Too many optimizer steps are skipped
-- severity: serious
-- meaning: GradScaler skips the optimizer's step when a gradient is not finite. A few at the start, while it looks
--   for its scale, and one now and then are how it works; many mean that something overflows at any scale, and that
--   batches are thrown away.
-- mend: Ask gradtrace first-nan for the boundary that is not finite; compute that part in float32.
-- value: number of steps that were skipped, on end or of the last 100
-- looks at: the events of skipped steps, which are there in full and in watched steps
-- needs: 1
-- threshold start = 10 steps: skipped on end at the start of the run
-- source start: torch.amp.GradScaler starts at 65536 by default and halves: after ten skips the scale is 64
-- threshold on_end = 3 steps: skipped on end later in the run
-- source on_end: our choice: the scale grows by a factor of two, so that one skip mends it and two are rare
-- threshold of_100 = 10 steps: skipped of the last 100, those at the start not counted
-- source of_100: our choice: by default a scale that is at its limit costs one step in 2,000
WITH numbered AS (
    SELECT
        *, row_number() OVER by_step AS number,
        bool_or(NOT skipped) OVER by_step AS started,
        row_number() OVER by_step - row_number() OVER (PARTITION BY rank, skipped ORDER BY step) AS island
    FROM course
    WINDOW by_step AS (PARTITION BY rank ORDER BY step)
),
on_end AS (
    SELECT rank, min(step) AS since, max(step) AS last_step, count(*) AS steps, any_value(started) AS started
    FROM numbered
    WHERE skipped
    GROUP BY rank, island
    HAVING steps >= CASE WHEN any_value(started) THEN $on_end ELSE $start END
),
shares AS (
    SELECT
        rank, step, number, skipped,
        count(*) FILTER (WHERE skipped) OVER (PARTITION BY rank ORDER BY step ROWS 99 PRECEDING) AS of_100,
        min(step) FILTER (WHERE skipped) OVER (PARTITION BY rank ORDER BY step ROWS 99 PRECEDING) AS since
    FROM numbered
    WHERE started
)
SELECT
    rank, NULL AS module, 'skip' AS tensor, NULL AS path, since, last_step AS step, steps::DOUBLE AS value,
    CASE WHEN started THEN $on_end ELSE $start END::DOUBLE AS threshold,
    format('on end, up to step {}', last_step) AS note
FROM on_end
UNION ALL
FROM (
    SELECT
        rank, NULL, 'skip', NULL, since, step, of_100::DOUBLE, $of_100::DOUBLE,
        format('of the 100 steps up to step {}', step)
    FROM shares
    WHERE of_100 >= $of_100
    QUALIFY row_number() OVER (PARTITION BY rank ORDER BY step) = 1
)
