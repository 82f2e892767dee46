-- loss-scale-collapse: The loss scale collapses
-- severity: serious
-- meaning: GradScaler halves the scale each time the scaled gradients overflow. A scale that has come down this far,
--   or below 1, no longer protects anything: the gradients overflow on their own, or are not finite for another
--   reason, which halving never mends.
-- mend: Ask gradtrace first-nan for the boundary that is not finite; compute that part in float32.
-- value: the loss scale
-- looks at: the scale with which each step was made, in full and in watched steps
-- needs: 1
-- threshold smallest = 1 : below this a scale makes gradients smaller, not larger
-- source smallest: by what the scale is for: float16 gradients are multiplied to keep them from underflow
-- threshold fall = 1024 times: below the highest scale so far
-- source fall: our choice: ten halvings on end; torch.amp.GradScaler starts at 65536 by default, halves after an
--   overflow and doubles after 2,000 steps without one
WITH highest AS (
    SELECT rank, step, loss_scale, max(loss_scale) OVER (PARTITION BY rank ORDER BY step) AS most
    FROM course
    WHERE loss_scale IS NOT NULL
),
fallen AS (
    FROM highest
    WHERE loss_scale < $smallest OR loss_scale <= most / $fall
    QUALIFY row_number() OVER (PARTITION BY rank ORDER BY step) = 1
)
SELECT
    rank, NULL AS module, 'loss_scale' AS tensor, NULL AS path,
    (
        SELECT coalesce(min(step), fallen.step) FROM highest AS h
        WHERE h.rank = fallen.rank AND h.step > coalesce((
            SELECT max(step) FROM highest AS top
            WHERE top.rank = fallen.rank AND top.step < fallen.step AND top.loss_scale = fallen.most
        ), -1)
    ) AS since,
    step, loss_scale AS value, greatest($smallest, most / $fall) AS threshold,
    format('down from {:.6g}', most) AS note
FROM fallen
