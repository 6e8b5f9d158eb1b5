"""``python -m mmkron``: the versions of the stack, what works with them, and what to do about what does not."""

from mmkron.utils.collect_env import compat_report

if __name__ == '__main__':
    print(compat_report())
