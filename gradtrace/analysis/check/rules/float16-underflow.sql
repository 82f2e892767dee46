-- float16-underflow: Gradients are too small for float16
-- severity: warning
-- meaning: Even the largest element of the gradient lies below the smallest normal number of float16, so that every
--   element has lost digits, and those below the smallest subnormal number have become zero.
-- mend: Use a loss scale (torch.amp.GradScaler), raise the one that is used, or compute in bfloat16.
-- value: the largest magnitude, of the largest of these steps
-- looks at: grad_output, grad_input and grad of dtype float16 in full steps, as they are stored: a loss scale is not
--   taken out, for it is there to prevent this. Gradients that were zero in all of these steps are passed over.
-- needs: steps full
-- threshold smallest = 6.103515625e-5 (2^-14): magnitude of the largest element
-- source smallest: the smallest normal number of IEEE 754 binary16 (torch.finfo(torch.float16).tiny); Micikevicius
--   and others, "Mixed Precision Training" (2018) scale the loss because of it
-- threshold steps = 3 steps: so many recorded steps on end, up to the last
-- source steps: our choice, so that one easy batch is no finding
WITH gradients AS (
    SELECT rank, module, tensor, path, step, max(extreme) AS extreme
    FROM seen
    WHERE dtype = 'float16' AND phase = 'backward' AND tensor IN ('grad', 'grad_input', 'grad_output')
    GROUP BY ALL
    HAVING sum(nan_count + posinf_count + neginf_count) = 0
),
ends AS (
    SELECT rank, module, tensor, path, coalesce(max(step) FILTER (WHERE extreme >= $smallest), -1) AS last_good
    FROM gradients
    GROUP BY ALL
)
SELECT
    rank, module, tensor, path, min(step) AS since, min(step) AS step, max(extreme) AS value, $smallest AS threshold,
    CASE WHEN max(extreme) < 0.5 * 2.0 ** -23 THEN 'below the smallest subnormal number, 6e-8'
    ELSE format('in {} steps up to the last', count(*)) END AS note
FROM gradients JOIN ends USING (rank, module, tensor, path)
WHERE step > last_good
GROUP BY rank, module, tensor, path
HAVING count(*) >= $steps AND max(extreme) > 0
