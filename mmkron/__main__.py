"""Print the versions of the stack, and the known problems of this environment with their remedies."""

from mmkron.utils.collect_env import compat_report

if __name__ == '__main__':
    print(compat_report())
