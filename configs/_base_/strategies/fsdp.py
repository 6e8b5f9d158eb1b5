# Parameters, gradients and optimizer states are spread over the processes; each block of the backbone is a unit.
runner_type = 'mmkron.FlexibleRunner'
strategy = dict(type='mmkron.FSDPStrategy')
