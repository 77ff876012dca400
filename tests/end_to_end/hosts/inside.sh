#!/bin/sh
# Makes a host out of the namespaces that this is started in, and becomes its sshd.
# Usage: inside.sh DIRECTORY NAME HOSTS_FILE AUTHORIZED_KEYS
# The host sees this machine's files as they are; what it writes is its own and lies in memory, but for
# /shared, a volume that all hosts see and that outlives them.
set -e
directory=$1 name=$2 hosts=$3 keys=$4
root=$directory/root
mount --make-rprivate /
mount -t tmpfs -o size=4g host "$directory"
mkdir "$directory/upper" "$directory/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$directory/upper,workdir=$directory/work" host "$root"

mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o size=1g,mode=1777 shm "$root/dev/shm"
mkdir "$root/dev/pts"
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mkdir -m 755 "$root/run/sshd"
mkdir "$root/shared"
mount --bind "$(dirname "$directory")/shared" "$root/shared"

hostname "$name"
cp "$hosts" "$root/etc/hosts"
rm -rf "$root/root/.ssh" "$root/root/.ray"
mkdir -m 700 "$root/root/.ssh"
cp "$keys" "$root/root/.ssh/authorized_keys"
chown -R 0:0 "$root/root/.ssh"
chroot "$root" ssh-keygen -q -A
exec chroot "$root" /usr/sbin/sshd -D -e -o UsePAM=no -o UseDNS=no \
    -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no
