-- unchanged-parameter: A parameter gets gradients and never changes
-- severity: warning
-- meaning: Smallest element, largest element and norm are the same, to the last bit, after every update, though
--   gradients arrive. Either no optimizer has the parameter (it was added or replaced after the optimizer was made),
--   or what the optimizer adds is lost to rounding (gradients that vanish, 16-bit weights with a small learning
--   rate), or the gradients are all zero.
-- mend: Hand the parameter to the optimizer; keep the weights in float32; or freeze it with requires_grad_(False),
--   which saves the time too.
-- value: number of updates that changed nothing
-- looks at: parameters after each update, in full steps that were not skipped and had a learning rate above 0.
--   Parameters without any gradient are frozen on purpose, or unused, and are no finding. A change that touches
--   neither the extremes nor, in single precision, the norm is not seen.
-- needs: updates full
-- threshold updates = 10 updates: so many must have changed nothing
-- source updates: our choice: a warm-up's first steps may be too small to see, ten of them are not
WITH still_at_first AS (  -- few, where all is well; the others need no more looking at
    SELECT rank, module, path
    FROM seen
    WHERE tensor = 'param' AND step <= (
        SELECT max(step) FROM (SELECT step FROM course WHERE in_full ORDER BY step LIMIT 10)
    )
    GROUP BY rank, module, path
    HAVING min("min") = max("min") AND min("max") = max("max") AND min(norm) = max(norm)
),
still AS (
    SELECT rank, module, path
    FROM seen SEMI JOIN still_at_first USING (rank, module, path)
    WHERE tensor = 'param'
    GROUP BY rank, module, path
    HAVING min("min") = max("min") AND min("max") = max("max") AND min(norm) = max(norm)
        AND sum(nan_count + posinf_count + neginf_count) = 0
),
updates AS (
    SELECT rank, module, path, min(step) AS since, max(step) AS last_step, count(DISTINCT step) AS updates
    FROM seen SEMI JOIN still USING (rank, module, path) JOIN course USING (rank, step)
    WHERE tensor = 'param' AND phase = 'optimizer' AND NOT skipped AND (lr IS NULL OR lr > 0)
    GROUP BY rank, module, path
    HAVING updates >= $updates
),
gradients AS (
    SELECT rank, module, path, max(extreme) AS extreme
    FROM seen SEMI JOIN updates USING (rank, module, path)
    WHERE tensor = 'grad'
    GROUP BY rank, module, path
)
SELECT
    rank, module, 'param' AS tensor, path, since, last_step AS step, updates::DOUBLE AS value,
    $updates::DOUBLE AS threshold,
    CASE WHEN extreme > 0 THEN format('though gradients of up to {:.3g} arrived', extreme)
    ELSE 'its gradients were all zero' END AS note
FROM updates JOIN gradients USING (rank, module, path)
