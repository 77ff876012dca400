{{/* Names and labels. A RayService may have 47 characters, and KubeRay adds to some names:
     40 leave room for all of ours. */}}

{{- define "topwork.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$" $name) }}
{{- fail (printf "nameOverride: %q is no name: take up to 40 small letters, digits and -, and begin with a letter" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{- define "topwork.fullname" -}}
{{- $name := include "topwork.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- $full = default $full .Values.fullnameOverride }}
{{- if gt (len $full) 40 }}
{{- /* Two long names that begin alike stay two. */}}
{{- $full = printf "%s-%s" ($full | trunc 31 | trimSuffix "-") ($full | sha256sum | trunc 8) }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) }}
{{- fail (printf "fullnameOverride: %q is no name of a Service; take small letters, digits and -, and begin with a letter" $full) }}
{{- end }}
{{- $full }}
{{- end }}

{{- define "topwork.selector" -}}
app.kubernetes.io/name: {{ include "topwork.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "topwork.labels" -}}
{{ include "topwork.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Metadata of an object: dict "root" $ "suffix" "-x". */}}
{{- define "topwork.metadata" -}}
name: {{ include "topwork.fullname" .root }}{{ .suffix }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "topwork.labels" .root | nindent 2 }}
{{- end }}

{{/* An image: dict "root" $ "flavour" "router", "cpu" or "cuda". */}}
{{- define "topwork.image" -}}
{{- $image := .root.Values.image }}
{{- $repository := include "topwork.registry" (dict "root" .root "image" $image.repository) }}
{{- with get $image.digests .flavour }}
{{- printf "%s@%s" $repository . }}
{{- else }}
{{- printf "%s:%s-%s" $repository (default .root.Chart.AppVersion $image.tag) .flavour }}
{{- end }}
{{- end }}

{{- define "topwork.registry" -}}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .image }}
{{- end }}

{{- define "topwork.serviceAccount" -}}
{{- default (include "topwork.fullname" .) .Values.serviceAccount }}
{{- end }}
