#!/bin/sh
# compose/make_certificates.sh [FOLDER] [CLIENT...]: authorities and certificates of a mesh, by OpenSSL. What is there stays: to renew a
# certificate remove its .pem; to let one more client in name it. SERVICES="a b" are the daemons' names in the compose file; SAN="DNS:x,IP:y" is
# added to what their certificates are valid for.
#
#   ca.pem, ca.key                    signs daemons: who is let in by inner daemons, and who is believed by whoever dials
#   clients-ca.pem, clients-ca.key    signs clients: they get as far as the router, and can serve as nothing
#   router-clients.pem                both: who the router lets in, for its health check has its own certificate
#   NAME.pem, NAME.key                of each daemon and client
#
# The .key files of both authorities sign newcomers: keep them off the machines that serve.
set -eu
umask 077
folder=${1:-tls}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- client
services=${SERVICES:-tokenizer detokenizer scheduler worker router front}
mkdir -p "$folder"
cd "$folder"

make_authority() { # FILE NAME
    [ -e "$1.pem" ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=$2" \
        -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$1.key" -out "$1.pem"
}

make_certificate() { # NAME AUTHORITY USAGE SUBJECT_ALT_NAME
    [ ! -e "$1.pem" ] || return 0
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
    printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" "extendedKeyUsage=$3" \
        "subjectAltName=$4" "authorityKeyIdentifier=keyid,issuer" > "$1.ext"
    # Whole or not at all: a certificate that is there is taken to be good.
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days "${DAYS:-365}" -extfile "$1.ext" -out "$1.pem.new"
    rm -f "$1.csr" "$1.ext"
    mv "$1.pem.new" "$1.pem"
}

for name in "$@" $services; do
    case $name in
    '' | ca | clients-ca | router-clients | *[!A-Za-z0-9._-]* | [!A-Za-z0-9]*) echo "$0: $name is no name of a file here" >&2; exit 2 ;;
    esac
done
for client in "$@"; do
    for service in $services; do
        [ "$client" != "$service" ] || { echo "$0: $client is a daemon's name, and a client's certificate is another's" >&2; exit 2; }
    done
done

make_authority ca "radixmesh daemons"
make_authority clients-ca "radixmesh clients"
cat ca.pem clients-ca.pem > router-clients.pem
for service in $services; do
    make_certificate "$service" ca serverAuth,clientAuth "DNS:$service,DNS:localhost,IP:127.0.0.1${SAN:+,$SAN}"
done
for client in "$@"; do
    make_certificate "$client" clients-ca clientAuth "DNS:$client"
done
