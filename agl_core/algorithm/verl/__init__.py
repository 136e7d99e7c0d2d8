"""Learning by VERL: its own Hydra configuration, estimators, losses and `TrainingWorker`.

`algorithm.VERL` is the class that users name. `config` composes VERL's configuration and `keys`
says which of its keys are honoured; both load without torch. `batch` turns rows into VERL's
tensors, `worker` drives the update, and `platform_cpu` lets both run where there is no GPU; these
three load torch and VERL (about 12 s).
"""
