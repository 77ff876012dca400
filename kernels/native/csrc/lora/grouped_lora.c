/* LoRA of experts: that of a row's adapter and one expert, on the pairs of rows and experts.
 *
 * Pairs are to lora_shrink and lora_expand what rows are else, and an expert of a slot is a slot:
 * experts/permute.c makes the runs of both.
 */
#include "lora/lora.h"

struct grouped_lora {
    struct lora lora; /* its table is [slots, experts, fields] */
    const struct run *runs;
    const int64_t *num_runs;
};

static void run_on_pairs(op_function function, const struct grouped_lora *p, struct worker *worker)
{
    const struct step *rows = worker->step, pairs = {.num_runs = *p->num_runs, .runs = p->runs};
    worker->step = &pairs;
    function(&p->lora, worker);
    worker->step = rows;
}

int64_t topwork_grouped_lora_shrink_scratch(const void *op)
{
    return topwork_lora_shrink_scratch(&((const struct grouped_lora *)op)->lora);
}

void topwork_grouped_lora_shrink(const void *op, struct worker *worker)
{
    run_on_pairs(topwork_lora_shrink, op, worker);
}

int64_t topwork_grouped_lora_expand_scratch(const void *op)
{
    return topwork_lora_expand_scratch(&((const struct grouped_lora *)op)->lora);
}

void topwork_grouped_lora_expand(const void *op, struct worker *worker)
{
    run_on_pairs(topwork_lora_expand, op, worker);
}
